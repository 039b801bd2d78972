"""What a new interpreter does to become a template: it runs modules that come compiled.

It stops nothing: whoever writes to its standard input decides what runs. The modules come before
the settings, compiled, which saves 20 ms.
"""

import marshal
import os
import sys
import types

size = int(os.read(0, 16), 16)
text = b""
while len(text) < size:
    text += os.read(0, size - len(text)) or sys.exit("whoever started this was killed")
for name, code in marshal.loads(text):
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(code, module.__dict__)
module.launch()
