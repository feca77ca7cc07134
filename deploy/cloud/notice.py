#!/usr/bin/env python3
"""Runs a command when the cloud announces that it takes this machine back.

    notice.py aws systemctl stop pccl-peer

The first argument is aws, gcp or azure. The command replaces this program. Asks the metadata
service every two seconds, and needs nothing but Python.
"""

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request

# The same address in all three clouds, and never reached through a proxy.
METADATA = "http://169.254.169.254"
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(url, method="GET", **headers):
    """The text at that address; None if there is nothing (404)."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, method=method, headers=names)
    try:
        with OPENER.open(request, timeout=10) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            return None
        raise


def aws(base):
    """Whether it is to be stopped, terminated or hibernated: two minutes before."""
    token = ask(f"{base}/latest/api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds="60")
    action = f"{base}/latest/meta-data/spot/instance-action"
    return ask(action, X_aws_ec2_metadata_token=token or "") is not None


def gcp(base):
    """Whether it is preempted. Its shutdown begins at the same time."""
    address = f"{base}/computeMetadata/v1/instance/preempted"
    return ask(address, Metadata_Flavor="Google") == "TRUE"


def azure(base):
    """Whether it is to be evicted: 30 s before. Events for other machines do not count."""
    found = ask(f"{base}/metadata/scheduledevents?api-version=2020-07-01", Metadata="true")
    ends = [
        event
        for event in json.loads(found or "{}").get("Events", [])
        if event.get("EventType") in ("Preempt", "Terminate")
    ]
    if not ends:
        return False
    address = f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    name = ask(address, Metadata="true")
    return any(name in event.get("Resources", []) for event in ends)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cloud", choices=("aws", "gcp", "azure"))
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a program and its arguments")
    parser.add_argument("--metadata", default=METADATA, help="another address, for tests")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two questions")
    options = parser.parse_args()
    if not options.command:
        parser.error("the command is missing")
    announced = {"aws": aws, "gcp": gcp, "azure": azure}[options.cloud]
    failure = ""
    while True:
        try:
            if announced(options.metadata):
                break
        except Exception as error:  # whatever the service answers
            if str(error) != failure:
                failure = str(error)
                print(f"notice: no answer of the metadata service: {failure}", file=sys.stderr)
        time.sleep(options.every)
    print(f"notice: {options.cloud} takes this machine back", file=sys.stderr, flush=True)
    os.execvp(options.command[0], options.command)


if __name__ == "__main__":
    main()
