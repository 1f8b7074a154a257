"""An environment of your own: a counter that is to be clicked to a number.

PYTHONPATH=examples/environment megatron-webrl train CONFIG tasks.environment=counter:Counter tasks.names=[up,down]
"""

from pathlib import Path

from megatron_webrl.browser import Page
from megatron_webrl.tasks import WebEnvironment
from megatron_webrl.trajectory import Task

HERE = Path(__file__).resolve().parent


class Counter(WebEnvironment):
    """`up` counts from 0 to a number that the seed gives, `down` back to 0."""

    folders = (HERE,)

    def start_url(self, task: Task) -> str:
        start = 0 if task.name == "up" else self.goal(task)
        return f"{(HERE / 'counter.html').as_uri()}#{start}"

    def utterance(self, task: Task) -> str:
        return f"Count {task.name} to {self.goal(task) if task.name == 'up' else 0}."

    async def reward(self, task: Task, page: Page) -> float | None:
        count = await page.evaluate("() => count")
        if count == (self.goal(task) if task.name == "up" else 0):
            return 1.0
        return 0.0 if abs(count) > 9 else None

    @staticmethod
    def goal(task: Task) -> int:
        return 1 + task.seed % 3
