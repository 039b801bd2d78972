"""train_tpu.py and train_dream.py hold copies of the same functions, since each is copied and
changed alone. Whoever changes one side changes the other, or takes it from the list.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
# equal word by word, but for the module of the model
SAME = {"batch_sizes", "micro_rows", "load_batch", "Meter", "exact_products", "wsd"}
# of the same name and purpose, each with what its model needs
KIN = {
    "Config", "settle", "main", "architecture", "find_data", "describe", "begin", "new_state", "step_flops", "decays",
    "make_optimizer", "accumulate", "make_step", "lower_step", "sums_of", "score", "sample", "evaluate",
}  # fmt: skip


def definitions(script, family):
    """{name: code without docstrings, with one name for the module of the model}."""
    found = {}
    for node in ast.parse((ROOT / script).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            for part in ast.walk(node):
                if isinstance(part, ast.FunctionDef) and ast.get_docstring(part):
                    del part.body[0]
            found[node.name] = ast.unparse(node).replace(f"{family}.", "family.")
    return found


def test_twins_are_equal_and_listed():
    coder = definitions("train_tpu.py", "pc")
    dream = definitions("train_dream.py", "md")
    assert coder.keys() & dream.keys() == SAME | KIN
    for name in SAME:
        assert coder[name] == dream[name]
