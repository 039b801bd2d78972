"""What E2B's cloud runs: the tests of one program, by the sandbox that comes with them. Prints.

It asks for no layer: the machine is one's own, and ends.
"""

import json
import os
import runpy
import tempfile

script, jail, settings, tests = json.loads("JOB")  # sandbox.py puts a job in its place
texts = {"sandbox.py": script} | {f"jail/{name}.py": text for name, text in jail.items()}
with tempfile.TemporaryDirectory() as folder:
    os.mkdir(f"{folder}/jail")
    for path, text in texts.items():
        with open(f"{folder}/{path}", "w", encoding="utf-8") as file:
            file.write(text)
    sandbox = runpy.run_path(f"{folder}/sandbox.py")
print(json.dumps(sandbox["answer"](settings, tests)))
