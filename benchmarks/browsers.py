"""Browser steps of ours, of raw Playwright and of BrowserGym on the same pages: speed, CPU, memory, and what a reset costs.

    python -m benchmarks.browsers [--slots 1,2,4,8] [--steps 60] [--rounds 3] [--without browsergym] [--json FILE]

A step is a click at coordinates and a PNG of 1280 × 768; the pages are MiniWoB++'s, N at once.  An arm runs in a process of its
own; arms take turns within a round, and the median round counts.

  ours        PagePool, the left_click action, our screenshot: like for like, no settling, no facts of the page
  ours_used   as the agent uses it: MiniWoB episodes, which settle, read the page's state and collect notes
  raw_playwright   plain async Playwright: one headless shell, a context a slot, page.mouse.click and page.screenshot
  browsergym  BrowserGym 0.14.3 with its delays off, a process and a browser a slot, in an environment that this makes with venv
              and pip (it pins another Playwright); left out, with a word, if that cannot be made

steps_per_second: of all slots together.  cpu_seconds_per_step: user and system time of all processes of the arm.
pss_bytes_per_slot: of the browsers' processes / N, between steps; all_pss_bytes_per_slot: with the Node driver and the Python
client, which come once a worker (for BrowserGym once a slot).  reset_seconds: what an episode waits between its beginning and
its first screenshot, in a context of its own, while others run; ours has the next context ready, raw makes one as a plain user
does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks._table import report, row
from megatron_webrl.processes import MARK, reap

VIEW = (1280, 768)
TASKS = ("click-button", "click-checkboxes", "click-test-2", "click-option")
EPISODE_STEPS = 10
ARMS = ("ours", "ours_used", "raw_playwright", "browsergym")
METRICS = {
    "steps_per_second": "1/s",
    "cpu_seconds_per_step": "s",
    "pss_bytes_per_slot": "bytes",
    "all_pss_bytes_per_slot": "bytes",
    "reset_seconds": "s",
}
PEER = "browsergym-core==0.14.3"
ARM_TIMEOUT_S = 300
BEGIN = "([seed]) => { core.EPISODE_MAX_TIME = 86400e3; Math.seedrandom(seed); core.startEpisodeReal(); }"


def spots(slot: int) -> list[tuple[int, int]]:
    """Where a slot clicks, step after step: beside what ends the episode."""
    return [(200 + 37 * (slot + n) % 900, 250 + 53 * (slot * 3 + n) % 450) for n in range(EPISODE_STEPS)]


def pages() -> list[str]:
    from megatron_webrl.tasks.miniwob import html_folder

    return [(html_folder() / "miniwob" / f"{name}.html").as_uri() for name in TASKS]


# The arms, each in a process of its own ---------------------------------------------------------------------------------


class Slot:
    """What an arm gives: an episode that begins with a reset, and its steps."""

    def __init__(
        self,
        reset: Callable[[int], Awaitable[None]],
        step: Callable[[int], Awaitable[None]],
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self.reset, self.step, self.end = reset, step, end


async def ours(slots: int) -> tuple[list[Slot], Callable[[], Awaitable[None]]]:
    from megatron_webrl.browser import AllowList, Page, PagePool, from_pixels, perform
    from megatron_webrl.config import BrowserConfig
    from megatron_webrl.tasks.miniwob import html_folder

    pool = PagePool(BrowserConfig(slots=slots, viewport=VIEW), AllowList(folders=(html_folder(),)))
    urls = pages()

    def slot(number: int) -> Slot:
        page: Page

        async def reset(episode: int) -> None:
            nonlocal page
            page = await pool.acquire()
            await page.goto(urls[episode % len(urls)], until="load")
            await page.evaluate(BEGIN, [episode])
            await page.screenshot()

        async def step(n: int) -> None:
            await perform(page, {"action": "left_click", "coordinate": from_pixels(spots(number)[n], VIEW)})
            await page.screenshot()

        async def end() -> None:
            await pool.release(page)

        return Slot(reset, step, end)

    return [slot(n) for n in range(slots)], pool.close


async def ours_used(slots: int) -> tuple[list[Slot], Callable[[], Awaitable[None]]]:
    from megatron_webrl.browser import from_pixels
    from megatron_webrl.config import validate
    from megatron_webrl.tasks import MiniWob, MiniWobEpisode
    from megatron_webrl.trajectory import Task

    config = {"model": {"path": "unused"}, "tasks": {"names": TASKS}, "browser": {"slots": slots, "viewport": VIEW}}
    environment = MiniWob(validate(config, "benchmark"))

    def slot(number: int) -> Slot:
        episode: MiniWobEpisode

        async def reset(count: int) -> None:
            nonlocal episode
            name = TASKS[count % len(TASKS)]
            episode = environment.episode(Task(name, "miniwob", name, count, EPISODE_STEPS))
            await episode.reset()

        async def step(n: int) -> None:
            await episode.act({"action": "left_click", "coordinate": from_pixels(spots(number)[n], VIEW)})
            await episode.observe()

        async def end() -> None:
            await episode.close()

        return Slot(reset, step, end)

    return [slot(n) for n in range(slots)], environment.close


async def raw_playwright(slots: int) -> tuple[list[Slot], Callable[[], Awaitable[None]]]:
    from playwright.async_api import async_playwright

    from megatron_webrl.browser import find_chromium

    playwright = await async_playwright().start()
    browser = await playwright.chromium.launch(executable_path=find_chromium(None))
    urls = pages()

    def slot(number: int) -> Slot:
        context: Any = None
        page: Any = None

        async def reset(episode: int) -> None:
            nonlocal context, page
            context = await browser.new_context(viewport={"width": VIEW[0], "height": VIEW[1]})
            page = await context.new_page()
            await page.goto(urls[episode % len(urls)])
            await page.evaluate(BEGIN, [episode])
            await page.screenshot()

        async def step(n: int) -> None:
            await page.mouse.click(*spots(number)[n])
            await page.screenshot()

        async def end() -> None:
            await context.close()

        return Slot(reset, step, end)

    async def close() -> None:
        await browser.close()
        await playwright.stop()

    return [slot(n) for n in range(slots)], close


async def measure(arm: str, slots: int, steps: int) -> dict[str, float]:
    """One arm at one size, in this process."""
    made, close = await {"ours": ours, "ours_used": ours_used, "raw_playwright": raw_playwright}[arm](slots)
    resets: list[float] = []

    async def run(slot: Slot, number: int, episodes: int, first: int) -> None:
        for count in range(first, first + episodes):
            began = time.perf_counter()
            await slot.reset(count * slots + number)
            resets.append(time.perf_counter() - began)
            for n in range(EPISODE_STEPS):
                await slot.step(n)
            if count < first + episodes - 1:
                await slot.end()

    try:
        await asyncio.gather(*(run(slot, n, 2, 0) for n, slot in enumerate(made)))  # warm
        await asyncio.gather(*(slot.end() for slot in made))
        resets.clear()
        episodes = max(2, steps // EPISODE_STEPS)
        await asyncio.gather(*(run(slot, n, episodes, 2) for n, slot in enumerate(made)))
        pss, everything = held(browsers=True), held(browsers=False)
        # Steps alone, the episodes standing: resets have a figure of their own.
        cpu, began = cpu_seconds(), time.perf_counter()

        async def only_steps(slot: Slot) -> None:
            for n in range(steps):
                await slot.step(n % EPISODE_STEPS)

        await asyncio.gather(*(only_steps(slot) for slot in made))
        wall, cpu = time.perf_counter() - began, cpu_seconds() - cpu
    finally:
        await close()
    return {
        "steps_per_second": steps * slots / wall,
        "cpu_seconds_per_step": cpu / (steps * slots),
        "pss_bytes_per_slot": pss / slots,
        "all_pss_bytes_per_slot": everything / slots,
        "reset_seconds": statistics.median(resets),
    }


def tree() -> list[psutil.Process]:
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def cpu_seconds() -> float:
    """Of this process and those below it, the dead included."""
    total = 0.0
    for process in tree():
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


def held(*, browsers: bool) -> float:
    """PSS of this process and those below it, bytes; of the browsers' processes alone."""
    total = 0
    for process in tree():
        with contextlib.suppress(OSError, psutil.Error):
            if browsers and "chrom" not in process.name():
                continue
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
    return float(total)


# BrowserGym, in its own environment: a process and a browser a slot ------------------------------------------------------

BROWSERGYM = """
import json, sys, time
import gymnasium
from browsergym.core.action.highlevel import HighLevelActionSet
from browsergym.core.env import BrowserEnv
from browsergym.core.task import AbstractBrowserTask
from playwright.sync_api import BrowserType

job = json.loads(sys.argv[1])
launch = BrowserType.launch

def launch_ours(self, **options):  # its chat window, too, is to be the browser that all arms use
    return launch(self, **{"executable_path": job["chromium"], **options})

BrowserType.launch = launch_ours

class Page(AbstractBrowserTask):
    episode = 0
    @classmethod
    def get_task_id(cls):
        return "page"
    def __init__(self, seed=0):
        super().__init__(seed)
        self.viewport = {"width": job["view"][0], "height": job["view"][1]}
        self.slow_mo, self.timeout = 0, 10000
    def setup(self, page):
        page.goto(job["pages"][Page.episode % len(job["pages"])])
        page.evaluate(job["begin"], [Page.episode])
        Page.episode += 1
        return "click", {}
    def validate(self, page, messages):
        return 0, False, "", {}
    def teardown(self):
        pass

env = BrowserEnv(task_entrypoint=Page, headless=True, pre_observation_delay=0,
                 action_mapping=HighLevelActionSet(subsets=["coord"]).to_python_code)

def step(n):
    x, y = job["spots"][n % len(job["spots"])]
    env.step(f"mouse_click({x}, {y})")

def reset():
    began = time.perf_counter()
    env.reset()
    return time.perf_counter() - began

reset()
for n in range(3):
    step(n)
resets = [reset() for _ in range(2)]
print(json.dumps({"resets": resets}), flush=True)
sys.stdin.readline()
for n in range(job["steps"]):
    step(n)
print("{}", flush=True)
sys.stdin.readline()
env.close()
"""


def peer_python() -> Path:
    """The interpreter of BrowserGym's environment, made if it is not there.  Raises RuntimeError if it cannot be."""
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_webrl" / PEER.replace("==", "-")
    )
    python = cache / "bin" / "python"
    ready = cache / "ready"
    if not ready.exists():
        print(f"making {cache} for {PEER} …", flush=True)
        for line in ([sys.executable, "-m", "venv", "--clear", cache], [python, "-m", "pip", "install", "-q", PEER]):
            done = subprocess.run(line, capture_output=True, text=True, timeout=900)
            if done.returncode:
                raise RuntimeError(f"{' '.join(map(str, line))}: {done.stderr.strip().splitlines()[-1:]}")
        ready.touch()
    return python


def browsergym(slots: int, steps: int) -> dict[str, float]:
    """As `measure`, of processes in its environment."""
    from megatron_webrl.browser import find_chromium

    python = peer_python()
    mark = f"benchmark-browsergym-{os.getpid()}"
    processes = []
    for number in range(slots):
        job = {"pages": pages(), "view": VIEW, "spots": spots(number), "steps": steps, "begin": BEGIN}
        line = [python, "-c", BROWSERGYM, json.dumps(job | {"chromium": str(find_chromium(None))})]
        processes.append(
            subprocess.Popen(
                line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, MARK: mark},
            )
        )

    def hear(process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("{"):
                return json.loads(text)
        raise RuntimeError("BrowserGym ended early")

    def go(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    try:
        resets = [seconds for process in processes for seconds in hear(process)["resets"]]
        pss, everything = held(browsers=True), held(browsers=False)
        mine, began = cpu_seconds(), time.perf_counter()
        for process in processes:
            go(process)
        for process in processes:
            hear(process)
        wall, cpu = time.perf_counter() - began, cpu_seconds() - mine
    finally:
        reap(mark)
        for process in processes:
            process.wait()
    return {
        "steps_per_second": steps * slots / wall,
        "cpu_seconds_per_step": cpu / (steps * slots),
        "pss_bytes_per_slot": pss / slots,
        "all_pss_bytes_per_slot": everything / slots,
        "reset_seconds": statistics.median(resets),
    }


# The table --------------------------------------------------------------------------------------------------------------


def run_arm(arm: str, slots: int, steps: int) -> dict[str, float]:
    """One arm in a process of its own."""
    line = [sys.executable, "-m", "benchmarks.browsers", "--arm", arm, "--slots", str(slots), "--steps", str(steps)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=ARM_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{arm}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", default="1,2,4,8", help="sizes, with commas between")
    parser.add_argument("--steps", type=int, default=60, help="a slot and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without", nargs="*", default=[], choices=ARMS, help="arms to leave out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [int(size) for size in options.slots.split(",")]
    if options.arm == "browsergym":
        print(json.dumps(browsergym(sizes[0], options.steps)))
        return
    if options.arm:
        print(json.dumps(asyncio.run(measure(options.arm, sizes[0], options.steps))))
        return
    arms = [arm for arm in ARMS if arm not in options.without]
    if "browsergym" in arms:
        try:
            peer_python()
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            print(f"browsergym is left out: its environment cannot be made ({error})")
            arms.remove("browsergym")
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(options.rounds):
        for size in sizes:
            for arm in arms:
                print(f"round {number + 1}: {arm}, {size} slots", flush=True)
                found.setdefault(f"{arm}_{size}", []).append(run_arm(arm, size, options.steps))
    medians = {case: {m: statistics.median(r[m] for r in rounds) for m in METRICS} for case, rounds in found.items()}
    report(
        [row(case, m, figures[m], unit) for case, figures in medians.items() for m, unit in METRICS.items()],
        options.json,
    )
    for size in sizes:
        for peer in ("raw_playwright", "browsergym"):
            if (theirs := medians.get(f"{peer}_{size}")) and (mine := medians.get(f"ours_{size}")):
                ratio = theirs["cpu_seconds_per_step"] / mine["cpu_seconds_per_step"]
                print(f"steps a CPU second, ours / {peer}, {size} slots: {ratio:.2f}")


if __name__ == "__main__":
    main()
