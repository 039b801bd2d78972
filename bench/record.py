"""Where the scripts of bench/ put their numbers: bench/results/<device>.json, a list of one entry
per claim.

An entry: name, value (the median), unit, spread (10th and 90th percentile, lowest and highest of
few, or null), device, versions, command, date, and whatever else the script measured. A script that
runs again replaces its own entry.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def cpu_name():
    """The CPU's own name and its units for bfloat16, by which training times differ most."""
    try:
        lines = [line.split(": ") for line in Path("/proc/cpuinfo").read_text().splitlines()]
        found = {line[0].strip(): line[1] for line in lines if len(line) == 2}
        units = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in found["flags"].split()]
        return f"{found['model name']} ({' and '.join(units) or 'no bfloat16 units'})"
    except (OSError, KeyError):
        return platform.processor() or platform.machine()


def claim(folder, settings):
    """Note with which settings the results in a folder are made. ValueError if it notes others."""
    path, settings = Path(folder) / "settings.json", json.loads(json.dumps(settings))
    saved = json.loads(path.read_text()) if path.exists() else settings
    if other := [
        f"{name}={saved.get(name)}" for name in settings if saved.get(name) != settings[name]
    ]:
        raise ValueError(f"{folder} holds results of {', '.join(other)}; choose another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings))


def record(file, name, value, unit, spread=None, device="", **more):
    """Write one entry into bench/results/<file>.json and print it."""
    # the versions that a number depends on, of what is installed
    packages = {}
    names = "jax jaxlib flax optax orbax-checkpoint libtpu torch tokenizers"
    for package in names.split():
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    entry = {
        "name": name,
        "value": value,
        "unit": unit,
        "spread": spread,
        "device": device or f"{cpu_name()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), **packages},
        "command": "python bench/" + shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        **more,
    }
    # replace the entry of that name
    path = RESULTS / f"{file}.json"
    entries = json.loads(path.read_text()) if path.exists() else []
    entries = [old for old in entries if old["name"] != name] + [entry]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(sorted(entries, key=lambda e: e["name"]), indent=2) + "\n")
    print(json.dumps(entry))


def judged(programs, tests, **how):
    """The results of sandbox.run_tests. RuntimeError if one could not be run: results are kept."""
    import sandbox

    results = sandbox.run_tests(programs, tests, **how)
    if failed := [result.error for result in results if result.rate is None]:
        raise RuntimeError(f"the sandbox failed: {failed[0]}; run the same command again")
    return results
