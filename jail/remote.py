"""What E2B's cloud runs: the tests of one program, by the sandbox that comes with them. Prints.

It asks for no layer of protection: the machine is one's own, and ends.
"""

import json
import pathlib
import runpy
import tempfile

script, jail, settings, tests = json.loads("JOB")  # sandbox.py puts a job in its place
with tempfile.TemporaryDirectory() as path:
    folder = pathlib.Path(path)
    (folder / "jail").mkdir()
    (folder / "sandbox.py").write_text(script, "utf-8")
    for name, text in jail.items():
        (folder / f"jail/{name}.py").write_text(text, "utf-8")
    sandbox = runpy.run_path(f"{folder}/sandbox.py")
print(json.dumps(sandbox["answer"](settings, tests)))
