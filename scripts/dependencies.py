#!/usr/bin/env python3
"""Checks the crates that the program is built from: their licenses, and versions that occur twice.

    scripts/dependencies.py            # check; exit status 1 with one line per problem
    scripts/dependencies.py --notices  # print the license texts, for those who distribute binaries

It reads `cargo metadata` of the workspace. It needs no network once the crates are downloaded.
"""

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

# Licenses under which a dependency may be used. All of them allow distribution in binaries with a notice.
ALLOWED = {
    "MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "ISC", "Zlib", "Unicode-3.0",
    "BSD-2-Clause", "BSD-3-Clause", "0BSD", "CC0-1.0", "MIT-0", "BSL-1.0", "Unlicense",
}
# Crates that occur in two versions, with the dependencies that need the older one.
TWICE = {
    "cpufeatures": "sha2",
    "getrandom": "tokenizers",
    "hashbrown": "safetensors",
    "itertools": "criterion",
    "miniz_oxide": "png",
    "rand": "half and tokenizers",
    "rand_core": "half and tokenizers",
    "syn": "derive_builder of tokenizers",
}
NOTICE_FILES = re.compile(r"^(LICEN[CS]E|COPYING|NOTICE|UNLICENSE)", re.IGNORECASE)


def metadata():
    command = [
        "cargo", "metadata", "--format-version", "1", "--locked",
        "--filter-platform", "x86_64-unknown-linux-gnu",
    ]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def allowed(expression):
    """Whether a license expression can be met with ALLOWED. `/` is the old spelling of OR."""
    def split(text, word):
        parts, depth, start = [], 0, 0
        tokens = list(re.finditer(r"\(|\)|\b" + word + r"\b", text))
        for token in tokens:
            depth += {"(": 1, ")": -1}.get(token.group(), 0)
            if token.group() == word and depth == 0:
                parts.append(text[start:token.start()])
                start = token.end()
        return parts + [text[start:]]

    text = expression.replace("/", " OR ").strip()
    if len(parts := split(text, "OR")) > 1:
        return any(allowed(part) for part in parts)
    if len(parts := split(text, "AND")) > 1:
        return all(allowed(part) for part in parts)
    if text.startswith("(") and text.endswith(")"):
        return allowed(text[1:-1])
    return text in ALLOWED


def problems(packages):
    found = []
    versions = defaultdict(set)
    for package in packages:
        versions[package["name"]].add(package["version"])
        if not allowed(package["license"] or "none"):
            found.append(f"{package['name']} {package['version']}: license {package['license']}")
    for name, several in sorted(versions.items()):
        if len(several) > 1 and name not in TWICE:
            found.append(f"{name} occurs as {', '.join(sorted(several))}: unify it, or add it to TWICE with the reason")
    found += [f"{name} occurs once: remove it from TWICE" for name in TWICE if len(versions[name]) < 2]
    return found


def notices(packages):
    for package in sorted(packages, key=lambda package: package["name"]):
        directory = Path(package["manifest_path"]).parent
        print(f"==== {package['name']} {package['version']} ({package['license']})\n")
        for file in sorted(directory.iterdir()):
            if NOTICE_FILES.match(file.name) and file.is_file():
                print(file.read_text(errors="replace").strip(), end="\n\n")


def main():
    packages = metadata()["packages"]
    if sys.argv[1:] == ["--notices"]:
        notices([package for package in packages if package["source"]])
        return 0
    found = problems(packages)
    print("\n".join(found) or f"{len(packages)} crates: licenses and versions are as expected")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
