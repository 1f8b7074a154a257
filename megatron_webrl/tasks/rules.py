"""Judges that need no model: rules about the answer and about the page on which an episode ended.  Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Literal
from urllib.parse import unquote, urlsplit

import msgspec

from megatron_webrl.tasks.environment import Evidence, Ruling, Verdict


class UrlRule(msgspec.Struct, tag="url", forbid_unknown_fields=True, frozen=True):
    """The page's address: exactly one of the three is given.  Compared without a final slash and with % decoded."""

    equals: str | None = None
    prefix: str | None = None
    matches: str | None = None
    """Regular expression, searched."""

    def __post_init__(self) -> None:
        if sum(way is not None for way in (self.equals, self.prefix, self.matches)) != 1:
            raise ValueError("give one of equals, prefix and matches")
        if self.matches is not None:
            try:
                re.compile(self.matches)
            except re.error as error:
                raise ValueError(f"matches={self.matches!r} is no regular expression ({error})") from None

    def holds(self, evidence: Evidence) -> bool:
        url = _address(evidence.page.url)
        if self.equals is not None:
            return url == _address(self.equals)
        if self.prefix is not None:
            return url.startswith(_address(self.prefix))
        return re.search(self.matches or "", evidence.page.url) is not None


class TextRule(msgspec.Struct, tag="text", forbid_unknown_fields=True, frozen=True):
    """The page shows a text; case and spaces do not count."""

    contains: str

    def holds(self, evidence: Evidence) -> bool:
        return _folded(self.contains) in _folded(evidence.page.text)


class ElementRule(msgspec.Struct, tag="element", forbid_unknown_fields=True, frozen=True):
    """The page has an element, with that text (a field: value) if `equals` or `contains` is given."""

    selector: str
    """CSS."""
    equals: str | None = None
    contains: str | None = None

    def holds(self, evidence: Evidence) -> bool:
        text = evidence.page.found.get(self.selector)
        if text is None:
            return False
        if self.equals is not None and _folded(text) != _folded(self.equals):
            return False
        return self.contains is None or _folded(self.contains) in _folded(text)


class AnswerRule(msgspec.Struct, tag="answer", forbid_unknown_fields=True, frozen=True):
    """The answer is one of some.  match: `exact`; `normalised`: see `normalised`; `contains`: holds one as whole words, both
    normalised."""

    one_of: list[str]
    match: Literal["exact", "normalised", "contains"] = "normalised"

    def __post_init__(self) -> None:
        if not self.one_of or not all(map(normalised, self.one_of)):
            raise ValueError("one_of must hold at least one answer, and none that is empty")

    def holds(self, evidence: Evidence) -> bool:
        if self.match == "exact":
            return evidence.answer in self.one_of
        answer = normalised(evidence.answer)
        if self.match == "normalised":
            return answer in map(normalised, self.one_of)
        return any(f" {normalised(one)} " in f" {answer} " for one in self.one_of)


Rule = UrlRule | TextRule | ElementRule | AnswerRule


def judge_by_rules(rules: Iterable[Rule], evidence: Evidence) -> Verdict:
    """Success if all hold."""
    broken = [msgspec.json.encode(rule).decode() for rule in rules if not rule.holds(evidence)]
    if broken:
        return Verdict(Ruling.FAILURE, f"does not hold: {'; '.join(broken)}")
    return Verdict(Ruling.SUCCESS, "all rules hold")


def normalised(answer: str) -> str:
    """Compatibility forms of Unicode (NFKC), case folded; numbers as they are meant: "€ 1,000.50" is "1000.5", "50 %" is "50%";
    other punctuation and articles left out; spaces single."""
    text = unicodedata.normalize("NFKC", answer[:10_000]).casefold()
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<=\d)\s+%", "%", text)
    text = re.sub(r"\d+\.\d+", lambda found: found[0].rstrip("0").rstrip("."), text)
    text = re.sub(r"(?<![\w])-(?=\d)", "−", text)  # a sign, not a dash
    text = re.sub(r"[^\w\s.%−]|(?<!\d)\.|\.(?!\d)", " ", text)
    return " ".join(word for word in text.split() if word not in ("a", "an", "the"))


def _folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _address(url: str) -> str:
    parts = urlsplit(url.strip())
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme.lower()}://{parts.netloc.lower()}{unquote(parts.path).rstrip('/')}{unquote(query)}"
