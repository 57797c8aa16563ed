"""A small reader of Varlink's interface language, for tests that compare the description with the code."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(r"\s*(?:#[^\n]*|(->|\[\]|\[string\]|[():,?]|[A-Za-z][\w.-]*))")


@dataclass
class Idl:
    """Member name -> field name -> type, written without spaces (`?[]int`); an inline type is `(...)`."""

    name: str = ""
    types: dict[str, dict[str, str]] = field(default_factory=dict)
    enums: dict[str, list[str]] = field(default_factory=dict)
    methods: dict[str, tuple[dict[str, str], dict[str, str]]] = field(default_factory=dict)
    errors: dict[str, dict[str, str]] = field(default_factory=dict)


def parse_idl(text: str) -> Idl:
    """The members of one interface; AssertionError where the text is not in the language."""
    tokens: list[str] = []
    at = 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match, f"cannot read {text[at : at + 40]!r}"
        if match[1]:
            tokens.append(match[1])
        at = match.end()
    return _Reader(tokens).interface()


class _Reader:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    def _next(self, expected: str = "") -> str:
        token = self._tokens[self._at]
        assert not expected or token == expected, f"expected {expected!r}, got {token!r}"
        self._at += 1
        return token

    def interface(self) -> Idl:
        idl = Idl()
        self._next("interface")
        idl.name = self._next()
        while self._at < len(self._tokens):
            kind, name = self._next(), self._next()
            assert name not in {*idl.types, *idl.enums, *idl.methods, *idl.errors}, f"{name} twice"
            if kind == "method":
                taken = self._fields()
                self._next("->")
                idl.methods[name] = (taken, self._fields())
            elif kind == "error":
                idl.errors[name] = self._fields()
            else:
                assert kind == "type", kind
                if self._tokens[self._at + 2] == ":":
                    idl.types[name] = self._fields()
                else:
                    idl.enums[name] = self._names()
        return idl

    def _names(self) -> list[str]:
        self._next("(")
        names = [self._next()]
        while self._next() == ",":
            names.append(self._next())
        return names

    def _fields(self) -> dict[str, str]:
        self._next("(")
        fields: dict[str, str] = {}
        while self._tokens[self._at] != ")":
            name = self._next()
            assert name not in fields, f"field {name} twice"
            self._next(":")
            fields[name] = self._type()
            if self._tokens[self._at] != ")":
                self._next(",")
                assert self._tokens[self._at] != ")", "a comma before the end"
        self._next(")")
        return fields

    def _type(self) -> str:
        token = self._next()
        if token in ("?", "[]", "[string]"):
            return token + self._type()
        return token
