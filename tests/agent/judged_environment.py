"""An environment for tests: one page, and a judge that takes its time and says what the answer says."""

from __future__ import annotations

import asyncio
from pathlib import Path

from megatron_webrl.config import RunConfig
from megatron_webrl.tasks import Evidence, Ruling, Verdict, WebEnvironment
from megatron_webrl.trajectory import JudgeCost, Task

FOLDER = Path(__file__).parent / "judged_pages"


class Judged(WebEnvironment):
    folders = (FOLDER,)
    judging = most = 0
    seen: list[Evidence] = []
    seconds = 0.0

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.judge = self._judge

    def start_url(self, task: Task) -> str:
        return (FOLDER / "page.html").as_uri()

    def utterance(self, task: Task) -> str:
        return "What is the word?"

    def selectors(self, task: Task) -> list[str]:
        return ["#word", "#none", "][", "input"]

    async def _judge(self, evidence: Evidence) -> Verdict:
        kind = type(self)
        kind.seen.append(evidence)
        kind.judging += 1
        kind.most = max(kind.most, kind.judging)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            kind.judging -= 1
        if evidence.answer == "error":
            raise RuntimeError("the judge has a defect")
        return Verdict(Ruling(evidence.answer), "because", JudgeCost(1, 2, 3, 0.5, 0.1))
