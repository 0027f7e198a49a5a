"""Another package's sources read with `ast`: where a name is defined, what it takes, and whether a call fits it.

Nothing is imported, so a checkout, an unpacked wheel or an installed package can be looked at on any machine.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

Function = ast.FunctionDef | ast.AsyncFunctionDef
_DEFAULT: Final = object()
_HOPS: Final = 8  # re-exports followed before giving up: a cycle of `from .x import *` must end


class Unreadable(ValueError):
    """A source file that is no Python of this version."""


@dataclass(frozen=True)
class Found:
    """A definition.

    Attributes:
        node: the function, class, or the statement that binds the name.
        file: the file it stands in.
    """

    node: ast.AST
    file: Path

    @property
    def line(self) -> int:
        return int(getattr(self.node, "lineno", 1))


@dataclass
class Tree:
    """The sources below one folder.

    Attributes:
        root: the folder that holds the top-level package.
    """

    root: Path
    _parsed: dict[Path, ast.Module] = field(default_factory=dict)

    def file(self, module: str) -> Path | None:
        """Return the file of a dotted module name, or None."""
        base = self.root.joinpath(*module.split("."))
        return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)

    def has(self, module: str) -> bool:
        """Return whether a module can be imported: a file, a compiled one, or a folder of modules."""
        base = self.root.joinpath(*module.split("."))
        return self.file(module) is not None or base.is_dir() or any(base.parent.glob(f"{base.name}.*so"))

    def parse(self, file: Path) -> ast.Module:
        """Return a file's syntax tree.

        Raises:
            Unreadable: with the line that is no Python.
        """
        if file not in self._parsed:
            try:
                self._parsed[file] = ast.parse(file.read_text(encoding="utf-8"))
            except (SyntaxError, ValueError) as error:
                line = getattr(error, "lineno", None) or 1
                raise Unreadable(f"{self.place(file, line)}: cannot be parsed: {error}") from error
        return self._parsed[file]

    def place(self, file: Path, line: int) -> str:
        """Return `folder/file.py:line` below the root."""
        return f"{file.relative_to(self.root).as_posix()}:{line}"

    def find(self, module: str, name: str, hops: int = _HOPS) -> Found | None:
        """Return where a name of a module, such as "Class.method", is defined; re-exports are followed.

        Raises:
            Unreadable: a file on the way is no Python.
        """
        file = self.file(module)
        if file is None or hops == 0 or not name:
            return None
        first, _, rest = name.partition(".")
        stars, last = [], None
        for node in statements(self.parse(file).body):
            if isinstance(node, ast.ImportFrom):
                source = absolute(node, module, is_package=file.name == "__init__.py")
                for alias in node.names:
                    if alias.name == "*":
                        stars.append(source)
                    elif (alias.asname or alias.name) == first:
                        last = self._imported(source, alias.name, hops) or last
            elif first in bound(node):
                last = Found(node, file)
        if last is None:
            # What a star brings is asked last: a definition of the module itself wins here.
            last = next((f for s in stars if (f := self.find(s, first, hops - 1))), None)
        return self._member(last, rest) if rest and last else last

    def _imported(self, source: str, name: str, hops: int) -> Found | None:
        found = self.find(source, name, hops - 1)
        file = self.file(f"{source}.{name}")
        return found or (Found(self.parse(file), file) if file else None)

    @staticmethod
    def _member(owner: Found, name: str) -> Found | None:
        for part in name.split("."):
            body = getattr(owner.node, "body", [])
            node = next((n for n in reversed(body) if part in bound(n)), None)
            if node is None:
                return None
            owner = Found(node, owner.file)
        return owner


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a body runs: those below if, with and try too, not those of functions."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.With, ast.Try, ast.For, ast.While)):
            for name in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def bound(node: ast.AST) -> set[str]:
    """Return the names that a statement binds (imports from elsewhere aside)."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = {t.id for target in targets if target is not None for t in ast.walk(target) if isinstance(t, ast.Name)}
    if isinstance(node, ast.Import):
        names |= {(a.asname or a.name.partition(".")[0]) for a in node.names}
    return names if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Import)) else set()


def absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """Return the dotted module that a `from … import` in `module` names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*base, *((node.module or "").split(".") if node.module else [])])


def signature(node: ast.AST, defaults: frozenset[str] = frozenset()) -> inspect.Signature | None:
    """Return what a function takes, or a class (its __init__, or the fields of a dataclass); None: cannot be told.

    Args:
        node: the definition.
        defaults: further parameters that have a default, as a decorator may give them.
    """
    if isinstance(node, ast.ClassDef):
        method = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        if method is not None:
            full = signature(method, defaults)
            return full and full.replace(parameters=list(full.parameters.values())[1:])
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
        return _fields(fields) if fields and not node.bases else None
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    a, kinds = node.args, inspect.Parameter
    plain = [*a.posonlyargs, *a.args]
    given = {x.arg for x in plain[len(plain) - len(a.defaults) :]} | set(defaults)
    given |= {x.arg for x, value in zip(a.kwonlyargs, a.kw_defaults, strict=True) if value is not None}

    def parameter(name: str, kind: inspect._ParameterKind) -> inspect.Parameter:
        return inspect.Parameter(name, kind, default=_DEFAULT if name in given else inspect.Parameter.empty)

    parameters = [parameter(x.arg, kinds.POSITIONAL_ONLY) for x in a.posonlyargs]
    parameters += [parameter(x.arg, kinds.POSITIONAL_OR_KEYWORD) for x in a.args]
    if a.vararg:
        parameters.append(inspect.Parameter(a.vararg.arg, kinds.VAR_POSITIONAL))
    parameters += [parameter(x.arg, kinds.KEYWORD_ONLY) for x in a.kwonlyargs]
    if a.kwarg:
        parameters.append(inspect.Parameter(a.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _fields(fields: list[ast.AnnAssign]) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                n.target.id if isinstance(n.target, ast.Name) else "",
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=_DEFAULT if n.value is not None else inspect.Parameter.empty,
            )
            for n in fields
        ]
    )


@dataclass(frozen=True)
class Call:
    """A call that has to fit.

    Attributes:
        name: what is called.
        positional: for each positional argument the names that its parameter may have.
        keywords: the keyword arguments.
    """

    name: str
    positional: tuple[frozenset[str], ...]
    keywords: frozenset[str]

    @classmethod
    def of(cls, text: str) -> Call:
        """Read a call such as "f(query, lengths | seqlens, scale=_)": `|` parts the names one parameter may have."""
        node = ast.parse(text, mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise ValueError(f"{text!r} is no call of a name")
        return cls(
            node.func.id,
            tuple(frozenset(n.id for n in ast.walk(a) if isinstance(n, ast.Name)) for a in node.args),
            frozenset(k.arg for k in node.keywords if k.arg),
        )

    def misfits(self, takes: inspect.Signature) -> tuple[list[str], list[str]]:
        """Return why the call cannot be made on what is there, and which of its arguments would be called otherwise."""
        # One keyword at a time, so that every one that is not there is named.
        names = set(takes.parameters)
        open_ended = any(p.kind is p.VAR_KEYWORD for p in takes.parameters.values())
        missing = [] if open_ended else sorted(self.keywords - names)
        wrong = [f"takes no argument {name!r}" for name in missing]
        try:
            takes.bind(*self.positional, **dict.fromkeys(self.keywords - set(missing)))
        except TypeError as error:
            wrong.append(str(error))
        places = [p for p in takes.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        renamed = [
            f"argument {i} is {place.name!r}, wanted {' or '.join(map(repr, sorted(allowed)))}"
            for i, (place, allowed) in enumerate(zip(places, self.positional, strict=False), 1)
            if place.name not in allowed
        ]
        return wrong, renamed
