"""third_party.py WHEEL: adds to a wheel what it says of the work of others that is in it.

* DISTRIBUTION.dist-info/sboms/pccl.cdx.json: CycloneDX, also written beside the wheel.
* DISTRIBUTION.dist-info/licenses/THIRD_PARTY.txt: the licences' texts.

Versions are those of the headers and libraries that this machine compiled and linked. An OpenSSL in
the wheel that is not the one described, or a text that is missing, is an error.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# The system whose headers and libraries the wheel has: this one, or that of a cross compiler.
SYSTEM = Path(os.environ.get("PCCL_AARCH64_ROOT", "/"))
DOCS = SYSTEM / "usr/share/doc"
# Where openssl.sh put the OpenSSL of the wheel; without it that is the system's.
OPENSSL = Path(os.environ.get("PCCL_WHEEL_OPENSSL", "/nowhere"))
COMMON = SYSTEM / "usr/share/common-licenses"
CXX = ["c++"] if SYSTEM == Path("/") else ["aarch64-linux-gnu-g++", f"--sysroot={SYSTEM}"]


@dataclass(frozen=True)
class Part:
    """Work of others in the wheel."""

    name: str
    version: str
    licence: str  # SPDX expression
    linkage: str  # how it gets in
    purl: str
    text: str  # of the licence


def run(*command: str) -> str:
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout.strip()


def macros(header: str) -> dict[str, str]:
    """The preprocessor's definitions after `header`."""
    folder = OPENSSL / "root/usr/include"
    includes = [f"-I{folder}", f"-I{folder}/x86_64-linux-gnu"] if folder.exists() else []
    found = subprocess.run(
        [*CXX, *includes, "-E", "-dM", "-x", "c++", "-std=c++20", "-DASIO_STANDALONE", "-"],
        input=f"#include <{header}>\n",
        check=True,
        text=True,
        capture_output=True,
    )
    pairs = (line.split(maxsplit=2)[1:] for line in found.stdout.splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def fetched() -> dict[str, str]:
    """Versions of the packages that openssl.sh fetched."""
    file = OPENSSL / "versions"
    return dict(line.split() for line in file.read_text().splitlines()) if file.exists() else {}


def debian(package: str) -> str:
    """The version of a Debian or Ubuntu package; empty elsewhere."""
    if package in fetched():
        return fetched()[package]
    try:
        database = f"--admindir={SYSTEM / 'var/lib/dpkg'}"
        return run("dpkg-query", database, "-W", "-f", "${Version}", package)
    except (OSError, subprocess.CalledProcessError):
        return ""


def purl(source: str, package: str, version: str) -> str:
    packaged = debian(package)
    if packaged:
        return f"pkg:deb/debian/{source}@{packaged.replace('+', '%2B').replace('~', '%7E')}"
    return f"pkg:generic/{source}@{version}"


def parts() -> list[Part]:
    openssl = macros("openssl/opensslv.h")["OPENSSL_VERSION_STR"].strip('"')
    asio = int(macros("asio/version.hpp")["ASIO_VERSION"])
    xxhash = macros("xxhash.h")
    hashes = ".".join(xxhash[f"XXH_VERSION_{part}"] for part in ("MAJOR", "MINOR", "RELEASE"))
    gcc = run(*CXX, "-dumpfullversion")
    nanobind = importlib.metadata.distribution("nanobind")
    zig = importlib.metadata.distribution("ziglang")
    asio_text = f"{asio // 100000}.{asio // 100 % 1000}.{asio % 100}"
    runtime = f"libstdc++-{gcc.partition('.')[0]}-dev"
    gpl = "GPL-3.0-or-later WITH GCC-exception-3.1"

    def text(package: str, common: str = "") -> str:
        docs = OPENSSL / "root/usr/share/doc" if package in fetched() else DOCS
        found = (docs / package / "copyright").read_text()
        return f"{found}\n{(COMMON / common).read_text()}" if common else found

    def shipped(distribution: importlib.metadata.Distribution, name: str) -> str:
        (path,) = [
            file
            for file in distribution.files or []
            if file.name == name and "licenses" in file.parts
        ]
        return path.read_text()

    compressors = [
        Part(name, version.partition(":")[2] or version, licence, f"static library {library}",
             purl(source, package, version), text(package))
        for name, source, package, licence, library in (
            ("Zstandard", "libzstd", "libzstd-dev", "BSD-3-Clause", "libzstd.a, which libcrypto.a needs"),
            ("zlib", "zlib", "zlib1g-dev", "Zlib", "libz.a, which libcrypto.a needs"),
        )
        if (version := fetched().get(package))
    ]  # fmt: skip
    return [
        Part("OpenSSL", openssl, "Apache-2.0", "static libraries libssl.a, libcrypto.a",
             purl("openssl", "libssl-dev", openssl), text("libssl-dev", "Apache-2.0")),
        Part("Asio", asio_text, "BSL-1.0", "headers",
             purl("asio", "libasio-dev", asio_text), text("libasio-dev")),
        Part("xxHash", hashes, "BSD-2-Clause", "headers",
             purl("xxhash", "libxxhash-dev", hashes), text("libxxhash-dev")),
        Part("nanobind", nanobind.version, "BSD-3-Clause", "headers",
             f"pkg:pypi/nanobind@{nanobind.version}", shipped(nanobind, "LICENSE")),
        Part("libstdc++", gcc, gpl, "headers; of libstdc++.a what GCC 8's libstdc++.so.6 lacks",
             purl("gcc", runtime, gcc), text(runtime, "GPL-3")),
        Part("glibc (libc_nonshared.a)", "2.28", "LGPL-2.1-or-later",
             "wrappers that every program of glibc before 2.33 links (stat, fstat)",
             f"pkg:pypi/ziglang@{zig.version}", (COMMON / "LGPL-2.1").read_text()),
        *compressors,
    ]  # fmt: skip


def sbom(name: str, version: str, found: list[Part]) -> str:
    own = f"pkg:pypi/{name}@{version}"
    components = [
        {
            "type": "library",
            "bom-ref": part.purl,
            "name": part.name,
            "version": part.version,
            "licenses": [{"expression": part.licence}],
            "purl": part.purl,
            "properties": [{"name": "pccl:linkage", "value": part.linkage}],
        }
        for part in found
    ]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": name,
                "version": version,
                "licenses": [{"expression": "MIT"}],
                "purl": own,
            }
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": [part.purl for part in found]}],
    }
    return json.dumps(document, indent=2) + "\n"


def third_party(found: list[Part]) -> str:
    head = "This wheel contains work of others, under the licences that follow.\n"
    lines = [f"* {part.name} {part.version}: {part.licence} ({part.linkage})" for part in found]
    texts = [
        f"{'=' * 100}\n{part.name} {part.version}\n{'=' * 100}\n\n{part.text}" for part in found
    ]
    return "\n".join([head, *lines, "", *texts])


def check_openssl(module: bytes, found: list[Part]) -> None:
    """The OpenSSL in the module is the one that the SBOM names."""
    versions = set(re.findall(rb"\0OpenSSL (\d+\.\d+\.\d+[a-z]*) ", module))
    named = {part.version.encode() for part in found if part.name == "OpenSSL"}
    if versions != named:
        sys.exit(f"third_party: the wheel has OpenSSL {versions}, its SBOM names {named}")


def record_line(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"


def main() -> None:
    wheel = Path(sys.argv[1])
    found = parts()
    with zipfile.ZipFile(wheel) as archive:
        files = [(info, archive.read(info)) for info in archive.infolist()]
    (info_dir,) = {i.filename.split("/")[0] for i, _ in files if ".dist-info/" in i.filename}
    (module,) = [content for info, content in files if info.filename.endswith(".so")]
    check_openssl(module, found)
    metadata = next(content for info, content in files if info.filename == f"{info_dir}/METADATA")
    fields = dict(re.findall(r"^(Name|Version): (.+)$", metadata.decode(), re.MULTILINE))
    bom = sbom(fields["Name"], fields["Version"], found)

    changed = {
        f"{info_dir}/sboms/pccl.cdx.json": bom.encode(),
        f"{info_dir}/licenses/THIRD_PARTY.txt": third_party(found).encode(),
        f"{info_dir}/METADATA": metadata.replace(
            b"License-File: LICENSE\n", b"License-File: LICENSE\nLicense-File: THIRD_PARTY.txt\n", 1
        ),
    }
    if changed[f"{info_dir}/METADATA"] == metadata:
        sys.exit("third_party: the metadata has no License-File: LICENSE")
    record = f"{info_dir}/RECORD"
    (date,) = {info.date_time for info, _ in files if info.filename == record}
    lines = []
    temporary = wheel.with_suffix(".part")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for info, content in files:
            if info.filename == record:
                continue
            content = changed.pop(info.filename, content)
            archive.writestr(info, content, zipfile.ZIP_DEFLATED, 9)
            if not info.is_dir():
                lines.append(record_line(info.filename, content))
        for name, content in changed.items():
            archive.writestr(zipfile.ZipInfo(name, date), content, zipfile.ZIP_DEFLATED, 9)
            lines.append(record_line(name, content))
        text = "\n".join([*lines, f"{record},,", ""])
        archive.writestr(zipfile.ZipInfo(record, date), text, zipfile.ZIP_DEFLATED, 9)
    temporary.replace(wheel)
    wheel.with_suffix(".cdx.json").write_text(bom)
    for part in found:
        print(f"{part.name} {part.version}: {part.licence}")


if __name__ == "__main__":
    main()
