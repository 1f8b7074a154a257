"""Browser steps of ours, of raw Playwright and of BrowserGym on the same pages: speed, CPU, memory, and what a reset costs.

    python -m benchmarks.browsers [--slots 1,2,4,8] [--steps 60] [--rounds 2] [--without browsergym] [--json FILE]

A step is a click at coordinates and a PNG of 1280 × 768; the pages are MiniWoB++'s, N at once, their seeds fixed.  Every click
hits something and no click ends an episode: an arm whose pictures stay as they are fails.  An arm runs in a process of its own;
arms take turns within a round, and the median round counts.

  ours        PagePool, the left_click action, our screenshot: like for like, no settling, no facts of the page
  ours_used   as the agent uses it: MiniWoB episodes, which settle, read the page's state and collect notes
  raw_playwright   plain async Playwright: one headless shell, a context a slot, page.mouse.click and page.screenshot
  browsergym  BrowserGym 0.14.3 with its delays off, a process and a browser a slot, in an environment that this makes with venv
              and pip (it pins another Playwright); left out, with a word, if that cannot be made

steps_per_second: of all slots together, resets apart.  cpu_seconds_per_step: user and system time of all processes of the arm.
pss_bytes_per_slot: of the browsers' processes / N, between steps; all_pss_bytes_per_slot: with the Node driver and the Python
client, which come once a worker (for BrowserGym once a slot).  reset_seconds: what an episode waits between its beginning and
its first screenshot, in a context of its own, episodes of ten steps back to back; ours has the next context ready, raw makes one
as a plain user does, and closes the one before, as BrowserGym does within its reset.  close_seconds: that closing; a slot of ours
waits for it after its episode, so add it to compare whole episodes.
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
from typing import Any, NamedTuple

import psutil

from benchmarks._table import report, row
from megatron_webrl.processes import MARK, reap

VIEW = (1280, 768)
SPOTS = {
    "click-checkboxes-soft": ((16, 61), (16, 80), (16, 99), (16, 118)),
    "click-option": ((17, 61), (17, 79)),
    "click-tab-2": ((27, 69), (72, 69), (115, 69)),
    "login-user": ((60, 83), (60, 125)),
}
"""Task -> where is something to click at whatever the seed, pixels; never what ends the episode."""
TASKS = tuple(SPOTS)
EPISODE_STEPS = 10
EPISODES = 2
"""Of BrowserGym a slot, measured, after one to warm up."""
RESETS = 6
"""Of the other arms, all slots together, but each slot makes at least EPISODES."""
CHANGING = 0.9
"""Share of the steps that must change the picture."""
REST_S = 1.0
"""Between the last reset and the steps: spare contexts are made by then."""
ARMS = ("ours", "ours_used", "raw_playwright", "browsergym")
METRICS = {
    "steps_per_second": "1/s",
    "cpu_seconds_per_step": "s",
    "pss_bytes_per_slot": "bytes",
    "all_pss_bytes_per_slot": "bytes",
    "reset_seconds": "s",
    "close_seconds": "s",
}
PEER = "browsergym-core==0.14.3"
ARM_TIMEOUT_S = 300
BEGIN = "([seed]) => { core.EPISODE_MAX_TIME = 86400e3; Math.seedrandom(seed); core.startEpisodeReal(); }"


def task(slot: int, episode: int) -> int:
    """Which of TASKS a slot's episode has."""
    return (slot + episode) % len(TASKS)


def spot(slot: int, episode: int, n: int) -> tuple[int, int]:
    """Where its step `n` clicks."""
    here = SPOTS[TASKS[task(slot, episode)]]
    return here[n % len(here)]


def pages() -> list[str]:
    from megatron_webrl.tasks.miniwob import html_folder

    return [(html_folder() / "miniwob" / f"{name}.html").as_uri() for name in TASKS]


# The arms, each in a process of its own ---------------------------------------------------------------------------------


class Slot(NamedTuple):
    """What an arm gives, for one slot: `reset` begins an episode, `step` returns its screenshot, `end` gives the page back."""

    reset: Callable[[int], Awaitable[None]]
    step: Callable[[int, int], Awaitable[bytes]]
    """Of an episode and a number within it."""
    end: Callable[[], Awaitable[None]]


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
            await page.goto(urls[task(number, episode)], until="load")
            await page.evaluate(BEGIN, [episode])
            await page.screenshot()

        async def step(episode: int, n: int) -> bytes:
            await perform(page, {"action": "left_click", "coordinate": from_pixels(spot(number, episode, n), VIEW)})
            return await page.screenshot()

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
            name = TASKS[task(number, count)]
            episode = environment.episode(Task(name, "miniwob", name, count, EPISODE_STEPS))
            await episode.reset()

        async def step(count: int, n: int) -> bytes:
            await episode.act({"action": "left_click", "coordinate": from_pixels(spot(number, count, n), VIEW)})
            return (await episode.observe()).screenshot

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
            await page.goto(urls[task(number, episode)])
            await page.evaluate(BEGIN, [episode])
            await page.screenshot()

        async def step(episode: int, n: int) -> bytes:
            await page.mouse.click(*spot(number, episode, n))
            return bytes(await page.screenshot())

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
    ends: list[float] = []
    changed = 0
    episodes = max(EPISODES, RESETS // slots)

    async def run(slot: Slot, first: int, last: int) -> None:
        """Episodes first … last-1; each ends as the next begins, so the newest stands."""
        for episode in range(first, last):
            if episode:
                began = time.perf_counter()
                await slot.end()
                ends.append(time.perf_counter() - began)
            began = time.perf_counter()
            await slot.reset(episode)
            resets.append(time.perf_counter() - began)
            for n in range(EPISODE_STEPS):
                await slot.step(episode, n)

    async def only_steps(slot: Slot) -> None:
        nonlocal changed
        before = b""
        for n in range(steps):
            shot = await slot.step(episodes, EPISODE_STEPS + n)
            changed += shot != before
            before = shot

    try:
        await asyncio.gather(*(run(slot, 0, 1) for slot in made))
        resets.clear()
        await asyncio.gather(*(run(slot, 1, 1 + episodes) for slot in made))
        await asyncio.sleep(REST_S)
        cpu, began = cpu_seconds(), time.perf_counter()
        await asyncio.gather(*map(only_steps, made))
        wall, cpu = time.perf_counter() - began, cpu_seconds() - cpu
        pss, everything = held(browsers=True), held(browsers=False)
    finally:
        await close()
    check_changed(changed, steps * slots)
    reset, end = statistics.median(resets), statistics.median(ends)
    return {
        "steps_per_second": steps * slots / wall,
        "cpu_seconds_per_step": cpu / (steps * slots),
        "pss_bytes_per_slot": pss / slots,
        "all_pss_bytes_per_slot": everything / slots,
        "reset_seconds": reset + end if arm == "raw_playwright" else reset,
        "close_seconds": end,
    }


def check_changed(changed: int, steps: int) -> None:
    """Raises RuntimeError if the clicks did nothing."""
    if changed < CHANGING * steps:
        raise RuntimeError(f"only {changed} of {steps} clicks changed the picture: they miss what is to be clicked")


def is_browser(process: psutil.Process) -> bool:
    return any(word in process.name() for word in ("chrom", "headless_shell"))


def strangers() -> int:
    """Browser processes on this machine, while no arm runs."""
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            count += is_browser(process)
    return count


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
            if browsers and not is_browser(process):
                continue
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
    return float(total)


# BrowserGym, in its own environment: a process and a browser a slot ------------------------------------------------------

BROWSERGYM = """
import ctypes, json, signal, sys, time
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the benchmark, however that ends
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
episode = -1

class Page(AbstractBrowserTask):
    @classmethod
    def get_task_id(cls):
        return "page"
    def __init__(self, seed=0):
        super().__init__(seed)
        self.viewport = {"width": job["view"][0], "height": job["view"][1]}
        self.slow_mo, self.timeout = 0, 10000
    def setup(self, page):
        page.goto(job["pages"][episode])
        page.evaluate(job["begin"], [episode])
        return "click", {}
    def validate(self, page, messages):
        return 0, False, "", {}
    def teardown(self):
        pass

env = BrowserEnv(task_entrypoint=Page, headless=True, pre_observation_delay=0,
                 action_mapping=HighLevelActionSet(subsets=["coord"]).to_python_code)

def step(n):
    here = job["spots"][episode]
    x, y = here[n % len(here)]
    return env.step(f"mouse_click({x}, {y})")[0]["screenshot"]

def run():
    global episode
    episode += 1
    began = time.perf_counter()
    env.reset()
    seconds = time.perf_counter() - began
    for n in range(job["episode_steps"]):
        step(n)
    return seconds

def say(**found):
    print(json.dumps(found), flush=True)
    if not sys.stdin.readline():
        sys.exit()

run()
say()
say(resets=[run() for _ in range(job["episodes"])])
before, changed = None, 0
for n in range(job["steps"]):
    shot = step(job["episode_steps"] + n)
    changed += before is None or bool((shot != before).any())
    before = shot
say(changed=changed)
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
    urls, episodes = pages(), 1 + EPISODES
    job = {"view": VIEW, "begin": BEGIN, "episodes": EPISODES, "episode_steps": EPISODE_STEPS, "steps": steps}
    job["chromium"] = str(find_chromium(None))
    processes = []

    def everyone() -> list[dict[str, Any]]:
        """What each says when it has done its part; then all wait for `go`."""
        found = []
        for process in processes:
            assert process.stdout is not None
            said = next((text for text in process.stdout if text.startswith("{")), None)
            if said is None:
                raise RuntimeError("BrowserGym ended early")
            found.append(json.loads(said))
        return found

    def go() -> None:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    try:
        for number in range(slots):
            tasks = [task(number, episode) for episode in range(episodes)]
            mine = {"pages": [urls[t] for t in tasks], "spots": [SPOTS[TASKS[t]] for t in tasks]}
            line = [python, "-c", BROWSERGYM, json.dumps(job | mine)]
            processes.append(subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        everyone()
        go()
        resets = [seconds for said in everyone() for seconds in said["resets"]]
        time.sleep(REST_S)
        cpu, began = cpu_seconds(), time.perf_counter()
        go()
        changed = sum(said["changed"] for said in everyone())
        wall, cpu = time.perf_counter() - began, cpu_seconds() - cpu
        pss, everything = held(browsers=True), held(browsers=False)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    check_changed(changed, steps * slots)
    return {
        "steps_per_second": steps * slots / wall,
        "cpu_seconds_per_step": cpu / (steps * slots),
        "pss_bytes_per_slot": pss / slots,
        "all_pss_bytes_per_slot": everything / slots,
        "reset_seconds": statistics.median(resets),
    }


# The table --------------------------------------------------------------------------------------------------------------


def run_arm(arm: str, slots: int, steps: int) -> dict[str, float]:
    """One arm in a process of its own, of which nothing stays.  steps: a slot.  Raises RuntimeError if it fails."""
    line = [sys.executable, "-m", "benchmarks.browsers", "--arm", arm, "--slots", str(slots), "--steps", str(steps)]
    mark = f"benchmark-browsers-{os.getpid()}"
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=ARM_TIMEOUT_S, env={**os.environ, MARK: mark}
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{arm}, {slots} slots: not done after {ARM_TIMEOUT_S} s") from None
    finally:
        reap(mark)
    if done.returncode:
        raise RuntimeError(f"{arm}, {slots} slots: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def aims(medians: dict[str, dict[str, float]], sizes: list[int]) -> list[str]:
    """What was aimed at, and what came of it."""
    lines = []
    for size in sizes:
        mine = medians.get(f"ours_{size}")
        if mine is None:
            continue
        for peer, aim in (("raw_playwright", 0.9), ("browsergym", 2.8)):
            if theirs := medians.get(f"{peer}_{size}"):
                ratio = theirs["cpu_seconds_per_step"] / mine["cpu_seconds_per_step"]
                lines.append(f"steps a CPU second, ours / {peer}, {size} slots: {ratio:.2f} (aim: at least {aim})")
        if size == 8:
            lines.append(f"PSS a slot, 8 slots: {mine['pss_bytes_per_slot'] / 1e6:.0f} MB (aim: at most 70)")
        if size == 1:
            lines.append(f"reset, 1 slot: {mine['reset_seconds']:.3f} s (aim: at most 0.100)")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", default="1,2,4,8", help="sizes, with commas between")
    parser.add_argument(
        "--steps", type=int, default=60, help="measured a round, all slots together; a slot makes at least 10"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--without", nargs="*", default=[], choices=ARMS, help="arms to leave out")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)  # with one size, and the steps of a slot
    options = parser.parse_args()
    try:
        sizes = [int(size) for size in options.slots.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(*sizes, options.steps, options.rounds) < 1:
        parser.error("--slots takes whole numbers with commas between, as 1,8; --steps and --rounds are at least 1")
    if options.arm == "browsergym":
        print(json.dumps(browsergym(sizes[0], options.steps)))
        return
    if options.arm:
        print(json.dumps(asyncio.run(measure(options.arm, sizes[0], options.steps))))
        return
    arms = [arm for arm in ARMS if arm not in options.without]
    left_out = ""
    if "browsergym" in arms:
        try:
            peer_python()
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            left_out = f"browsergym is left out: its environment cannot be made ({error})"
            print(left_out, flush=True)
            arms.remove("browsergym")
    found: dict[str, list[dict[str, float]]] = {}
    others = 0
    for number in range(options.rounds):
        for size in sizes:
            for arm in arms:
                print(f"round {number + 1}: {arm}, {size} slots", flush=True)
                others = max(others, strangers())
                steps = max(10, -(-options.steps // size))
                found.setdefault(f"{arm}_{size}", []).append(run_arm(arm, size, steps))
    medians = {case: {m: statistics.median(r[m] for r in rounds) for m in rounds[0]} for case, rounds in found.items()}
    report(
        [row(case, m, value, METRICS[m]) for case, figures in medians.items() for m, value in figures.items()],
        options.json,
    )
    shared = f"{others} other browser processes ran: pages that they share make PSS read too low" if others else ""
    for line in filter(None, [left_out, shared, *aims(medians, sizes)]):
        print(line)


if __name__ == "__main__":
    main()
