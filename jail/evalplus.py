"""EvalPlus' rules for what a program of HumanEval+ or MBPP+ returns. Pure.

problems.py sends this text to the judge of sandbox.py, with the lines entry, mbpp and atol of a
problem after it. The judge calls right() for each value; an exception here is a wrong value.
It does not run the program. Rules of evalplus 0.3.1 (eval/__init__.py, eval/_special_oracle.py,
Apache-2.0), except that HumanEval/32 can pass, as in later versions. Ref: arXiv:2305.01210.
"""

import itertools
import math

entry = ""  # name of the function that is tested
mbpp = False  # whether the problem is of MBPP+
atol = 0.0  # absolute tolerance; it rises with the first result of floats
data = []  # results of the reference solution, from the judge

# MBPP+: functions whose results are compared as sets, and those of which only None counts
SETS = """similar_elements find_char_long common_in_nested_lists extract_singly larg_nnum
intersection_array find_dissimilar Diff""".split()
NOT_NONE = "check_str text_match_three text_starta_endb".split()


def right(i, inputs, value):
    """Whether a value is right for the inputs number i."""
    global atol
    want = data[i]
    if entry == "find_zero" and not mbpp:  # any root will do
        return abs(sum(c * math.pow(value, power) for power, c in enumerate(inputs[0]))) <= atol
    same = special(inputs, value, want) if mbpp else value == want
    # The tolerance of floats stays for the values that follow.
    if atol == 0 and floats(want):
        atol = 1e-6
    if not same and atol:
        import numpy as np

        same = (
            type(value) is type(want)
            and not holds_range(value)  # NumPy would expand it
            and np.allclose(value, want, rtol=1e-7, atol=atol)
            and (not isinstance(want, list | tuple) or len(value) == len(want))
        )
    return bool(same)


def special(inputs, value, want):
    """Whether a value is right by the rules that MBPP+ has for some functions."""
    if entry in SETS:
        # a huge range would fill the memory
        return len(value) <= 1_000_000 and set(value) == set(want)
    if entry in NOT_NONE:
        found = value if isinstance(value, bool) else value is not None
        return found == (want is not None)
    same = value == want
    if same or entry == "are_equivalent":
        return True
    if entry == "sum_div":
        return value == 0
    if entry == "surface_Area":  # the height may also be that of the pyramid
        edge, height = inputs
        area = round(edge**2 + 2 * edge * math.sqrt((edge / 2) ** 2 + height**2))
        return abs(value - area) <= atol
    if entry == "digit_distance_nums":  # with zeros in front of the shorter number
        digits = [map(int, reversed(str(number))) for number in inputs]
        pairs = itertools.zip_longest(*digits, fillvalue=0)
        return value == sum(abs(a - b) for a, b in pairs)
    return False


def holds_range(value):
    if isinstance(value, list | tuple):
        return any(map(holds_range, value))
    return isinstance(value, range)


def floats(value):
    """Whether a value is a float, or a list or an array of floats."""
    if type(value).__name__ == "ndarray":
        return str(value.dtype) in ("float64", "float32")
    items = value if isinstance(value, list | tuple) else [value]
    return bool(items) and all(isinstance(item, float) for item in items)
