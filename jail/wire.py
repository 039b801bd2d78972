"""What a judge and a program's process say to each other: values as JSON, and objects that stay.

It stops no program: inside.py does. Nor does it believe one. What comes through is data or the
number of an object, and an end answers only what permits() allows. Two objects of a program's own
classes are compared where they are, so a program decides whether those are equal.

The standard library alone, as inside.py, which runs beside it. wire() and unwire() are the format
of values; a Remote stands for an object of the other process; a Peer is one end of the pipes
between the two.
"""

import builtins
import json
import operator
import os
import re
import sys
import types
from contextlib import suppress
from importlib import import_module

# ---- the wire format of values -------------------------------------------------------------------
# Types that are built anew from arguments: name -> the arguments that make a value. VIEWS: how to
# make views of a dict.
ARGUMENTS = """
builtins.range builtins.slice collections.Counter decimal.Decimal datetime.date datetime.time
datetime.datetime datetime.timedelta
"""
ARGUMENTS = dict.fromkeys(ARGUMENTS.split(), lambda value: value.__reduce__()[1])
ARGUMENTS |= {
    "fractions.Fraction": lambda value: value.as_integer_ratio(),
    "datetime.timezone": lambda value: [value.utcoffset(None)],
    "collections.deque": lambda value: [list(value), value.maxlen],
    "collections.OrderedDict": lambda value: [list(value.items())],
    "collections.defaultdict": lambda value: [value.default_factory, dict(value)],
}
VIEWS = {
    "builtins.dict_keys": lambda items: dict.fromkeys(items).keys(),
    "builtins.dict_values": lambda items: dict(enumerate(items)).values(),
    "builtins.dict_items": lambda items: dict(items).items(),
}
ARGUMENTS |= dict.fromkeys(VIEWS, lambda value: [list(value)])
LARGE = 1 << 63  # larger integers travel as hexadecimal digits: Python limits decimal ones
# the only type of their arguments
EXACT = {"fractions.Fraction": int, "builtins.range": int, "decimal.Decimal": str}
BUILTIN = "bool int float complex str bytes bytearray list tuple set frozenset dict object"
BUILTIN = {name: getattr(builtins, name) for name in BUILTIN.split()}
MUTABLE = """
builtins.list builtins.bytearray builtins.set builtins.dict collections.deque numpy.ndarray
numpy.matrix collections.OrderedDict collections.defaultdict collections.Counter
""".split()
TAGS = {"b": bytes, "y": bytearray, "t": tuple, "s": set, "f": frozenset}
TAG_OF = {kind: tag for tag, kind in TAGS.items()}


def wire(value, other, share=None):
    """The JSON form of a value: exact for builtin types, those in ARGUMENTS and NumPy's.

    other(value, form) gives that of any other object; `form` is that of its builtin value, None if
    its class has none. It is read by the builtin type's own methods, so that a subclass cannot
    misreport it. share(container) gives its number and whether it is new; one that is known is its
    number alone.
    """
    kind = type(value)
    if share and f"{kind.__module__}.{kind.__qualname__}" in MUTABLE:
        number, new = share(value)
        return {"k": [number, contents(value, other, share)] if new else [number]}
    return contents(value, other, share)


def is_plain(items):
    """Whether JSON has all items of a list as they are: a fast path for long ones."""
    kinds = {*map(type, items)}
    if kinds == {int}:
        return -LARGE < min(items) and max(items) < LARGE
    return kinds <= {float, str, bool, type(None)}


def dtype_of(form):
    """The type of NumPy's, without objects, that a text describes, or names with such forms."""
    if isinstance(form, list):
        form = [(name, dtype_of(each)) for name, each in form]
    elif not re.fullmatch(r"[<>|]?[biufcSUMm]\d+(\[\d*[a-zA-Z]+\])?", form):
        raise TypeError(f"no type of NumPy's: {form!r}")
    return import_module("numpy").dtype(form)


def contents(value, other, share=None):
    """wire() of what a container holds, or of any other value."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if value is None or kind is bool or (kind is int and -LARGE < value < LARGE):
        return value
    if kind is list and is_plain(value):
        return [*value]
    if kind.__module__ == "numpy" and hasattr(value, "dtype"):
        descr = value.dtype.descr if value.dtype.names else value.dtype.str
        shape = list(value.shape) if value.ndim or name in MUTABLE else None
        return {"a": [descr, shape, value.tobytes().decode("latin-1"), kind.__name__]}
    if name in ARGUMENTS:
        return {"r": [name, *(contents(each, other, share) for each in ARGUMENTS[name](value))]}
    base = next(base for base in BUILTIN.values() if issubclass(kind, base))
    if base is object:
        return other(value, None)
    if base is int:
        form = {"i": int.__format__(value, "x")}  # decimal digits are limited to 4,300
    elif base is float:
        form = float.__pos__(value)
    elif base is str:
        form = str.__str__(value)
    elif base is complex:
        form = {"c": [complex.real.__get__(value), complex.imag.__get__(value)]}
    elif base is dict:
        form = {
            "d": [
                [wire(key, other, share), wire(item, other, share)]
                for key, item in dict.items(value)
            ]
        }
    elif base in (bytes, bytearray):
        form = {TAG_OF[base]: b"".join([value]).decode("latin-1")}
    else:
        items = [wire(item, other, share) for item in base.__iter__(value)]
        form = items if base is list else {TAG_OF[base]: items}
    return form if kind is base else other(value, form)


class Opaque:
    """Stands for an object that is not data: equal to nothing; callable, so that it can be a
    factory.
    """

    def __call__(self):
        raise TypeError("this object is the program's")


def unwire(form, other=lambda tag, content: Opaque()):
    """The value of a JSON form; other(tag, content) resolves those of objects. It raises anything
    for a wrong form.
    """
    if isinstance(form, list):
        return [*form] if is_plain(form) else [unwire(item, other) for item in form]
    if not isinstance(form, dict):
        return form
    ((tag, content),) = form.items()
    if tag == "i":
        return int(content, 16)
    if tag == "c":
        return complex(*content)
    if tag == "d":
        return {unwire(key, other): unwire(value, other) for key, value in content}
    if tag in TAGS:
        if isinstance(content, str):
            return TAGS[tag](content.encode("latin-1"))
        return TAGS[tag](unwire(item, other) for item in content)
    if tag == "a":
        descr, shape, data, kind = content
        numpy = import_module("numpy")
        array = numpy.frombuffer(data.encode("latin-1"), dtype_of(descr))
        array = array.reshape(shape or ()).copy()
        if shape is None:  # a scalar
            return array[()]
        return array.view(numpy.matrix) if kind == "matrix" else array
    if tag == "r" and content[0] in ARGUMENTS:
        module, _, name = content[0].rpartition(".")
        make = VIEWS.get(content[0]) or getattr(import_module(module), name)
        arguments = [unwire(argument, other) for argument in content[1:]]
        # a short line that would make a large value: a range written out, a fraction such as
        # 1e999999999
        exact = EXACT.get(content[0])
        if range in map(type, arguments) or (exact and {exact} != {*map(type, arguments)}):
            raise TypeError(f"no arguments of {content[0]}: {arguments}")
        return make(*arguments)
    return other(tag, content)


def plain(value, form):
    """For wire(): an object of a subclass counts as its builtin value, others are refused."""
    if form is None:
        raise TypeError(f"values of {type(value)}")
    return form


def opaque(value, form):
    """For wire(): an object of a subclass counts as its builtin value, of others it says that there
    is one.
    """
    if isinstance(value, Remote) and value.__own__.has_base:
        return wire(value.__value__, opaque)
    return {"o": 0} if form is None else form


# ---- the judge: what each of two processes may ask of the other's objects ------------------------
UNARY = """
len iter next reversed bool str repr int float complex index abs round neg pos invert hash format
""".split()
ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
BINARY = "eq ne lt le gt ge divmod".split() + ARITHMETIC
# these change nothing
READING = "len bool str repr int float complex index abs round hash base".split()
WRITTEN = "getitem setitem delitem contains neg pos invert index eq ne lt le gt ge".split()
IN_PLACE = [f"i{name}" for name in ARITHMETIC]
OPERATIONS = {name: getattr(operator, f"__{name}__") for name in WRITTEN + ARITHMETIC + IN_PLACE}
for name in UNARY + BINARY:
    OPERATIONS.setdefault(name, getattr(builtins, name, None))
OPERATIONS |= {
    "isinstance": lambda kind, value: isinstance(value, kind),
    "issubclass": lambda kind, other: issubclass(other, kind),
    "get": getattr,
    "set": setattr,
    "del": delattr,
    "call": operator.call,
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager, error: type(manager).__exit__(
        manager, error and type(error), error, None
    ),
    "base": lambda value: unwire(wire(value, plain)),
    "run": lambda coroutine: import_module("asyncio").run(coroutine),
}
OPERATIONS |= {  # asked of the operand on the right
    f"r{name}": lambda right, left, apply=OPERATIONS[name]: apply(left, right) for name in BINARY
}
# What changes an object: methods of builtin types that are asked for at its own side.
CHANGING = """
append extend insert pop remove clear sort reverse update setdefault popitem add discard
difference_update intersection_update symmetric_difference_update
""".split()


# Attributes of functions and classes, by which a test looks at them.
ABOUT = """
__name__ __qualname__ __bases__ __slots__ __members__ __wrapped__ __code__ __defaults__
__kwdefaults__ __annotations__
""".split()
# Types that isinstance() and inspect find in an object of the other side. Not type: pytest.raises()
# would take a class of the program that poses as any exception.
KINDS = {
    name: getattr(types, f"{name}Type")
    for name in "Function Method BuiltinFunction Generator Coroutine".split()
}


def asks(operation):
    """A method that asks the other side for an operation."""

    def ask(self, /, *args, **options):
        return self.__own__.peer.ask(operation, self, *args, **options)

    return ask


def as_line(content):
    return f"{json.dumps(content)}\n".encode()


class Own(types.SimpleNamespace):
    """What a Remote knows."""

    is_class = False


class Remote:
    """An object of the other side: calls, attributes, items and iteration are asked for there.

    Its builtin value, if it has one, is read once, and counts in its stead wherever a test looks at
    it. Operators are asked for there between two such objects only: an object that claims to equal
    all never sees what it is compared with. One that the test made itself, by a class that it
    names, has its own methods, and + * divmod and `in` with anything.
    """

    def __init__(self, peer, number, has_base, kind):
        # under names that no program has
        vars(self)["__own__"] = Own(
            peer=peer,
            number=number,
            has_base=has_base,
            kind=kind,
            answers={},
            # a program asks the test's own objects for operators
            made=kind == "__main__" and not peer.permits,
        )

    def __read__(self, operation):
        """The answer to an operation of READING, kept until the other side is asked to do
        something.
        """
        # So an object cannot be one number where it is first looked at and another where it is
        # looked at again.
        own = self.__own__
        if operation not in own.answers or own.answers[operation][0] != own.peer.changes:
            own.answers[operation] = own.peer.changes, own.peer.ask(operation, self)
        return own.answers[operation][1]

    @property
    def __value__(self):
        """Its builtin value as it is now, or an object that equals nothing."""
        return self.__read__("base") if self.__own__.has_base else object()

    # so that isinstance(a named tuple, tuple)
    __class__ = property(lambda self: KINDS.get(self.__own__.kind) or type(self.__value__))

    def __getattr__(self, name):
        if name.startswith("__") and name not in ABOUT:
            raise AttributeError(name)
        own = self.__own__
        if (
            own.has_base
            and not own.made
            and name not in CHANGING
            and hasattr(type(self.__value__), name)
        ):
            return getattr(self.__value__, name)
        return own.peer.ask("get", self, name)

    __setattr__ = asks("set")
    __delattr__ = asks("del")
    __instancecheck__ = asks("isinstance")

    def __contains__(self, item):
        own = self.__own__
        if own.made:
            return own.peer.ask("contains", self, item)
        return item in (self.__value__ if own.has_base else (each for each in self))

    def __subclasscheck__(self, other):
        # a test that expects the program's exception would hide its own failure
        if type(other) is type and issubclass(other, BaseException):
            return False
        return self.__own__.peer.ask("issubclass", self, other)

    def __exit__(self, kind, error, trace):
        answer = self.__own__.peer.ask("exit", self, error)
        # the program's does not count: it could suppress a failed assertion
        return not self.__own__.peer.permits and answer


class Caller(Remote):
    """An object of the other side that can be called."""

    __call__ = asks("call")


Remote.__doc__ = Caller.__doc__ = property(
    lambda self: self.__own__.peer.ask("get", self, "__doc__")
)


def forwarded(name):
    """A method of Remote that asks for an operation, or does it with the builtin value."""

    def apply(self, *args):
        own = self.__own__
        if own.has_base and not own.made and name not in "str repr setitem delitem next".split():
            return OPERATIONS[name](self.__value__, *args)
        if name in READING and not args:
            return self.__read__(name)
        return own.peer.ask(name, self, *args)

    return apply


def between(name):
    """A binary operator of Remote, and the same with its operands exchanged."""

    def apply(left, right):
        remote = [side for side in (left, right) if isinstance(side, Remote)]
        own = remote[0].__own__
        with_anything = not own.peer.permits or name in "add iadd mul imul divmod".split()
        if len(remote) == 2 or (with_anything and own.made):
            if remote[0] is left:
                return own.peer.ask(name, left, right)
            return own.peer.ask(f"r{name}", right, left)
        return OPERATIONS[name](
            *(side.__value__ if isinstance(side, Remote) else side for side in (left, right))
        )

    return apply, lambda right, left: apply(left, right)


for name in UNARY + "getitem setitem delitem enter".split():
    setattr(Remote, f"__{name}__", forwarded(name))
for name in BINARY + IN_PLACE:  # Python never calls those named __req__ and the like
    plainly, exchanged = between(name)
    setattr(Remote, f"__{name}__", plainly)
    setattr(Remote, f"__r{name}__", exchanged)


def state(container):
    """What a container holds: its very items, as those that can change are shared by themselves; or
    its bytes.
    """
    if hasattr(container, "dtype"):
        return container.tobytes()
    if isinstance(container, dict):
        return [*container, *container.values()]
    return bytes(container) if type(container) is bytearray else [*container]


def same(before, now):
    if type(now) is bytes:
        return now == before
    return len(now) == len(before) and all(map(operator.is_, now, before))


# Attributes of exceptions that vars() does not have.
HIDDEN = "__cause__ __notes__ filename filename2 name path".split()


class Peer:
    """One end of the pipes between a test and a program: asks the other end, and meanwhile answers
    its questions.

    A message is a line of JSON: [kind, content, containers that changed, containers to forget]. Its
    content is [operation, arguments, options] of an "ask", the value of a "got", or the exception
    of a "raised". Data is copied, and lists and the like are kept equal at both ends as long as
    both use them; any other object travels as the number that its own side gave it.
    permits(operation, target, ...) is set at the judge's end: the program may ask about objects
    that it was given, and no others, and name types but no functions, or it could name exec.
    """

    def __init__(self, read, write, permits=None):
        self.lines = open(read, "rb")
        self.pipe = open(write, "wb")
        self.permits = permits
        self.held = []  # our objects that the other end knows
        self.numbers = {}  # their numbers, by id
        self.remotes = {}  # its objects by number
        self.errors = {}  # its exception classes by name
        self.changes = 0  # how often the other end was asked for what may change its objects
        self.shared = {}  # containers at both ends, with what they held
        self.ids = {}  # their numbers, by id; below 0 for its own
        self.count = 0  # how many are ours
        self.stops = False  # whether the test names StopIteration

    # What travels.
    def share(self, value):
        """For wire(): the number of a container, and whether the other end does not have it yet."""
        if new := id(value) not in self.ids:
            self.count += 1
            self.ids[id(value)] = self.count
            self.shared[self.count] = [value, None]
        return self.ids[id(value)], new

    def form(self, value):
        return wire(value, self.refer, self.share)

    def refer(self, value, form):
        """The form of an object that stays here, or that the other end has too."""
        kind = type(value)
        if kind in (Peer, Own) or (
            hasattr(kind, "__self__") and isinstance(value.__self__, Remote)
        ):
            raise TypeError("what is behind an object of the program does not travel")
        if isinstance(value, Remote):
            return {"mine": value.__own__.number}
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"error": self.family_of(value)}
        if isinstance(value, BaseException):
            return {"raised": self.form_of_error(value)}
        # not by its own __name__: a class may answer for any attribute
        name = next((name for name, each in vars(builtins).items() if each is value), "")
        if name and (self.permits or name in BUILTIN):
            return {"builtin": name}
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.held)
            self.held.append(value)
        return {
            "yours": [
                self.numbers[id(value)],
                form is not None,
                callable(value),
                *(name for name, each in KINDS.items() if isinstance(value, each)),
                kind.__module__,
            ]
        }

    def resolve(self, tag, content):
        """The object of a form that wire() made at the other end."""
        if tag == "k":
            number = -content[0]
            if len(content) > 1:
                value = unwire(content[1], self.resolve)
                self.shared[number] = [value, None]
                self.ids[id(value)] = number
            return self.shared[number][0]
        if tag == "mine":
            return self.held[content]
        if tag == "error":
            return self.error(*content[:2])  # the program may say nothing of as_base
        if tag == "raised":
            return self.error_of(*content)
        if tag == "builtin":
            return BUILTIN[content] if self.permits else getattr(builtins, content)
        if tag == "module":
            return types.ModuleType(content)
        number, has_base, calls, kind = [*content, True, ""][:4]
        make = Caller if calls else Remote
        remote = self.remotes.setdefault(number, make(self, number, has_base, kind))
        return self.awaitable(remote) if kind == "Coroutine" else remote

    async def awaitable(self, remote):
        """A coroutine of the other end; it runs there, to its end, when it is awaited here."""
        return self.ask("run", remote)

    def form_of_error(self, error):
        """[family of its class, arguments, attributes, text]."""
        forms = {}
        values = {name: getattr(error, name, None) for name in HIDDEN}
        for name, value in (values | vars(error) | {"args": [*error.args]}).items():
            if name in HIDDEN or not name.startswith("_"):
                with suppress(Exception):
                    forms[name] = wire(value, self.refer)
        return [self.family_of(type(error)), forms.pop("args", []), forms, str(error)]

    def family_of(self, kind):
        """family(), by which a class of the test is found again where it comes back."""
        name, parents = names = family(kind)
        if self.permits and parents:
            self.errors.setdefault(name, kind)
        return names

    def error(self, name, parents, as_base=False):
        """An exception class like that of the other end: the library's own, or one derived as that
        one is.
        """
        kind = library_class(name)
        # never the class of a failed assertion: a test that expects the program's class would hide
        # its own failure
        if kind and (as_base or not (self.permits and issubclass(AssertionError, kind))):
            return kind
        if name not in self.errors:
            bases = (
                (kind,) if kind else tuple(self.error(*parent, as_base=True) for parent in parents)
            )
            if not bases:
                raise TypeError(f"{name} is no exception")
            self.errors[name] = type(
                name.rpartition(".")[2],
                bases,
                {"__str__": lambda self: vars(self).get("_text", "")},
            )
        return self.errors[name]

    def error_of(self, family, args, attributes, text):
        """An exception like that of form_of_error()."""
        kind = self.error(*family[:2])
        args = unwire(args, self.resolve)
        try:
            error = kind(*args)
        except Exception:  # a class of the program that wants other arguments
            error = kind.__new__(kind, *args)
            error.args = tuple(args)
        for name, form in attributes.items():
            value = unwire(form, self.resolve)
            if name not in HIDDEN:
                vars(error)[name] = value
            elif value:
                setattr(error, name, value)
        vars(error)["_text"] = text
        return error

    # Messages.
    def send(self, kind, content):
        """Send a message, and with it what has changed since the last one in containers that both
        ends have.
        """
        changed = []
        waiting = [*self.shared]
        while waiting:
            entry = self.shared[number := waiting.pop()]
            known = self.count
            if entry[1] is None or not same(entry[1], state(entry[0])):
                if entry[1] is not None:
                    changed.append([number, contents(entry[0], self.refer, self.share)])
                entry[1] = state(entry[0])
            waiting += range(known + 1, self.count + 1)  # what is new in it
        forgotten = [
            number for number in self.shared if sys.getrefcount(self.shared[number][0]) <= 2
        ]
        for number in forgotten:
            del self.ids[id(self.shared.pop(number)[0])]
        self.pipe.write(as_line([kind, content, changed, forgotten]))
        self.pipe.flush()

    def receive(self):
        """(kind, content) of the next message; its content is not resolved yet."""
        line = self.lines.readline()
        if not line.endswith(b"\n"):
            os._exit(1)  # the other end is gone
        return json.loads(line)

    def update(self, changed, forgotten):
        """Change our containers as those at the other end, and drop those that it dropped."""
        for number, form in changed:
            value = self.shared[-number][0]
            new = unwire(form, self.resolve)
            if hasattr(value, "dtype"):
                value[...] = new
            else:
                value.clear()
                if hasattr(value, "extend"):
                    value.extend(new)
                else:
                    kind = dict if type(value).__name__ == "Counter" else type(value)
                    kind.update(value, new)  # Counter.update() adds
            self.shared[-number][1] = None
        for entry in self.shared.values():
            if entry[1] is None:
                entry[1] = state(entry[0])
        for number in forgotten:
            if entry := self.shared.pop(-number, None):
                del self.ids[id(entry[0])]

    def ask(self, operation, /, *args, **options):
        """The result of an operation at the other end, or the exception that it raises there."""
        if operation not in READING:
            self.changes += 1
        self.send(
            "ask",
            [
                operation,
                [*map(self.form, args)],
                {k: self.form(v) for k, v in options.items()},
            ],
        )
        while True:
            kind, content, *news = self.receive()
            if kind == "ask":
                self.answer(content, *news)
                continue
            value = unwire(content, self.resolve) if kind == "got" else self.error_of(*content)
            self.update(*news)
            if kind == "raised":
                # in a map or a generator of the test it would end the loop, and the test with it
                ends = (
                    isinstance(value, StopIteration | StopAsyncIteration)
                    and operation != "next"
                    and not self.stops
                )
                raise RuntimeError("StopIteration") if ends else value
            if isinstance(value, Remote):
                makes = operation == "call" and args[0].__own__.is_class
                made = any(isinstance(arg, Remote) and arg.__own__.made for arg in args)
                if makes or (made and operation not in "call get getitem next timed".split()):
                    value.__own__.made = True
            return value

    def answer(self, content, *news):
        """Do what the other end asks for, and send the result or the exception."""
        try:
            operation, forms, options = content
            args = [unwire(form, self.resolve) for form in forms]
            options = {key: unwire(form, self.resolve) for key, form in options.items()}
            self.update(*news)
            if self.permits and not (
                forms[0].keys() == {"mine"} and self.permits(operation, *args)
            ):
                raise (AttributeError if operation == "get" else PermissionError)(operation)
            value = OPERATIONS[operation](*args, **options)
            reply = "got", self.form(value)
        except BaseException as error:
            reply = "raised", self.form_of_error(error)
        args = options = value = None  # what only the other end still has is forgotten
        self.send(*reply)


def family(kind):
    """[full name of an exception class, families of the exceptions that it is derived from: [] of
    the library's].
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    if library_class(name) is kind:
        return [name, []]
    return [name, [family(base) for base in kind.__bases__ if issubclass(base, BaseException)]]


STEERING = {"unittest", "asyncio", "doctest"}  # their exceptions skip a test or cancel it
NUMPY = """
numpy numpy.exceptions numpy.linalg numpy._core._exceptions numpy.core._exceptions
""".split()


def library_class(name):
    """The exception class of this full name in the standard library or NumPy; None if there is
    none, or in STEERING.
    """
    module, _, name = name.rpartition(".")
    # Importing runs a module, in the judge and in a folder of the program's: of NumPy none but
    # those of its exceptions.
    if module in NUMPY or (
        module.partition(".")[0] in sys.stdlib_module_names - STEERING and "__main__" not in module
    ):
        with suppress(ImportError, AttributeError):
            kind = getattr(import_module(module), name)
            # as test.support has
            hidden = STEERING & {base.__module__.partition(".")[0] for base in kind.__mro__}
            if issubclass(kind, BaseException) and not hidden:
                return kind
