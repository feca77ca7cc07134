"""Serves text from a byte-GPT while it trains elsewhere: a follower, no member of the run.

    pccl run -n 4 --show-join -- python examples/byte_gpt.py --publish
    PCCL_MASTER=... PCCL_SECRET=... python examples/serve_text.py    # as the first one prints them
    curl 'http://127.0.0.1:8000/?prompt=def%20main'

Each answer names the revision that has written it. With `--print 3` there is no server: it prints
what the first three revisions make of `--prompt`.
"""

from __future__ import annotations

import argparse
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

try:
    import torch
    from byte_gpt import ByteGPT
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install 'pccl-collectives[torch]'", file=sys.stderr)
    sys.exit(2)

import pccl


class Writer:
    """Writes text with the latest revision. Any thread."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model = ByteGPT(args.width, args.layers, args.heads)
        self.context, self.length = args.context, args.length
        self.revision = -1
        self.lock = threading.Lock()  # guards the model and its revision

    def load(self, found: pccl.Revision) -> None:
        with self.lock:
            found.load(self.model)
            self.revision = found.revision

    @torch.no_grad()
    def write(self, prompt: str, temperature: float = 0.5) -> tuple[int, str]:
        with self.lock:
            text = list(prompt.encode() or b"\n")
            for _ in range(self.length):
                logits = self.model.logits(torch.tensor([text[-self.context :]]))[0, -1]
                chances = torch.softmax(logits / temperature, 0)
                text.append(int(torch.multinomial(chances, 1)))
            return self.revision, bytes(text).decode(errors="replace")


def handler(writer: Writer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            prompt = parse_qs(urlsplit(self.path).query).get("prompt", ["import "])[0][:1000]
            revision, text = writer.write(prompt)
            answer = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(answer)))
            self.send_header("X-Revision", str(revision))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--master", help="of the run; default: PCCL_MASTER")
    parser.add_argument("--port", type=int, default=8000, help="(%(default)s) at 127.0.0.1")
    parser.add_argument("--print", type=int, metavar="N", help="print texts of N revisions instead")
    parser.add_argument("--prompt", default="def main(", help="(%(default)s) for --print")
    sizes = {"length": 200, "context": 128, "width": 128, "layers": 5, "heads": 4}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="(%(default)s)")
    args = parser.parse_args()
    writer = Writer(args)
    with pccl.follow(args.master) as follower:
        print("waits for the first revision", flush=True)
        writer.load(follower.next())
        if not args.print:
            server = ThreadingHTTPServer(("127.0.0.1", args.port), handler(writer))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            print(f"serves text at http://127.0.0.1:{server.server_port}/?prompt=def", flush=True)
        shown = 0
        while True:
            if args.print:
                revision, text = writer.write(args.prompt)
                print(f"revision {revision}: {text!r}", flush=True)
                shown += 1
                if shown == args.print:
                    break
            writer.load(follower.next())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
    except pccl.PCCLError as error:  # the run is over, say
        sys.exit(str(error))
