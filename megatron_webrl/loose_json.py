"""JSON as models really write it: read in linear time, and only where there is one way to read it.

Beyond JSON: trailing commas; strings in single or typographic quotes; line breaks in strings; keys without quotes; True, False
and None; closing brackets missing at the very end.  Never: a key with two values, NaN.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 50
MAX_CHARACTERS = 200_000
QUOTES = {'"': '"', "'": "'", "“": "”", "‘": "’"}
_SPACE = re.compile(r"[\s\ufeff]*")
_NUMBER = re.compile(r"[-+]?\d{1,40}(?:\.\d{1,40})?(?:[eE][-+]?\d{1,3})?(?![\w.])")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,60}")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """The first value at `start`: (value, where it ends).  Raises ValueError."""
    if len(text) - start > MAX_CHARACTERS:
        raise ValueError("it is too long")
    reader = _Reader(text, start)
    value = reader.value(0)
    return value, reader.at


class _Reader:
    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at

    def _peek(self) -> str:
        """The next character that is no space; empty at the end."""
        found = _SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return self.text[self.at : self.at + 1]

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        first = self._peek()
        if first == "{":
            return self._object(depth)
        if first == "[":
            return self._array(depth)
        if first and first in QUOTES:
            return self._string(first)
        if number := _NUMBER.match(self.text, self.at):
            self.at = number.end()
            written = number[0].lstrip("+")
            return float(written) if any(mark in written for mark in ".eE") else int(written)
        word = _WORD.match(self.text, self.at)
        if word and word[0] in _WORDS:
            self.at = word.end()
            return _WORDS[word[0]]
        raise ValueError(f"no value at {self.text[self.at : self.at + 20]!r}" if first else "it ends too early")

    def _object(self, depth: int) -> dict[str, Any]:
        self.at += 1
        found: dict[str, Any] = {}
        while (mark := self._peek()) not in ("}", ""):
            if mark in QUOTES:
                key = self._string(mark)
            elif word := _WORD.match(self.text, self.at):
                key, self.at = word[0], word.end()
            else:
                raise ValueError(f"no key at {self.text[self.at : self.at + 20]!r}")
            if self._peek() != ":":
                raise ValueError(f"no colon after {key[:20]!r}")
            self.at += 1
            value = self.value(depth + 1)
            if key in found and found[key] != value:
                raise ValueError(f"{key[:20]!r} occurs twice")
            found[key] = value
            if not self._goes_on("}"):
                break
        self.at = min(self.at + 1, len(self.text))
        return found

    def _array(self, depth: int) -> list[Any]:
        self.at += 1
        found: list[Any] = []
        while self._peek() not in ("]", ""):
            found.append(self.value(depth + 1))
            if not self._goes_on("]"):
                break
        self.at = min(self.at + 1, len(self.text))
        return found

    def _goes_on(self, close: str) -> bool:
        """Past a comma; False at the closing bracket or the end of the text."""
        mark = self._peek()
        if mark == ",":
            self.at += 1
            return True
        if mark in (close, ""):
            return False
        raise ValueError(f"no comma at {self.text[self.at : self.at + 20]!r}")

    def _string(self, quote: str) -> str:
        """A double quote ends it; an apostrophe does where a comma, colon, closing bracket or the end follows."""
        out: list[str] = []
        close, at, text = QUOTES[quote], self.at + 1, self.text
        while at < len(text):
            mark = text[at]
            if mark == "\\" and at + 1 < len(text):
                at += 1
                if text[at] == "u" and re.fullmatch(r"[0-9a-fA-F]{4}", text[at + 1 : at + 5]):
                    out.append(chr(int(text[at + 1 : at + 5], 16)))
                    at += 4
                else:
                    out.append(_ESCAPES.get(text[at], text[at]))
            elif mark == close and (close not in "'’" or self._ends_after(at)):
                self.at = at + 1
                return _joined(out)
            else:
                out.append(mark)
            at += 1
        raise ValueError("a string does not end")

    def _ends_after(self, at: int) -> bool:
        found = _SPACE.match(self.text, at + 1)
        end = found.end() if found else at + 1
        return end >= len(self.text) or self.text[end] in ",:}]"


def _joined(parts: list[str]) -> str:
    """With the halves of surrogate pairs made whole, as JSON means them."""
    text = "".join(parts)
    if any("\ud800" <= mark <= "\udfff" for mark in text):
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return text


def strict_json(text: str) -> Any:
    """JSON by the book, but that a key must not occur twice.  Raises ValueError."""

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
