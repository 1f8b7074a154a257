"""WebGym's tasks: JSONL files of rows, read in a stream, and their environment on the open web."""

from __future__ import annotations

import array
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from megatron_webrl.config import RunConfig, TasksConfig
from megatron_webrl.errors import UserError
from megatron_webrl.tasks.environment import Evidence, Verdict
from megatron_webrl.tasks.rubric import Criterion, RubricJudge
from megatron_webrl.tasks.rules import ElementRule, Rule, judge_by_rules
from megatron_webrl.tasks.web import WebEnvironment
from megatron_webrl.trajectory import Task

ENVIRONMENT = "webgym"
LEVELS = range(1, 16)
ROW_BYTES = 1 << 20


class Row(msgspec.Struct):
    """A task.  Other keys are ignored."""

    task_id: str | int
    task_name: str
    """The task in words."""
    website: str
    """Where it begins."""
    difficulty: int
    """1 (easy) to 15: WebGym's number of facts asked."""
    domain: str | None = None
    subdomain: str | None = None
    evaluator_reference: list[Criterion] | str | None = None
    """What a rubric judge asks."""
    reference_answer: str | None = None
    rules: list[Rule] = []
    """All must hold; then no rubric judge is asked."""

    def __post_init__(self) -> None:
        if self.difficulty not in LEVELS:
            raise ValueError(f"difficulty={self.difficulty} is not one of 1 to 15")
        if not str(self.task_id) or not self.task_name.strip():
            raise ValueError("task_id and task_name must not be empty")
        if not self.rules and not self.criteria and not self.reference_answer:
            raise ValueError("it has nothing to judge by: give rules, evaluator_reference or reference_answer")
        if not _is_web(self.url):
            raise ValueError(f"website={self.website!r} is no address of the web")

    @property
    def url(self) -> str:
        return self.website if "://" in self.website else f"https://{self.website}"

    @property
    def criteria(self) -> list[Criterion]:
        found = self.evaluator_reference or []
        return [Criterion(found)] if isinstance(found, str) else found


def _is_web(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        return False


_decoder = msgspec.json.Decoder(Row, strict=False)


class TaskFile:
    """The rows of a JSONL file: checked once, in a stream; after that a row is read where it is.

    Keeps 9 bytes a row, and a digest of its task_id.  key: of the configuration that names the file.  Raises UserError that
    names file, line, what is wrong and the remedy.
    """

    seeds = (0, 1)

    def __init__(self, path: Path, key: str, config: TasksConfig) -> None:
        self._config = config
        self._offsets = array.array("Q")
        self._levels = array.array("B")
        self.ids: set[int] = set()
        """Hashes of the task_ids, equal in one process."""
        self.without_rules: str | None = None
        """The first task_id that a rubric judge decides."""
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise UserError(f"{key}={path} cannot be read ({error.strerror}): give a JSONL file of tasks") from None
        offset = 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                try:
                    if len(line) > ROW_BYTES:
                        raise ValueError(f"it has more than {ROW_BYTES} bytes")
                    row = _decoder.decode(line)
                    if hash(str(row.task_id)) in self.ids:
                        raise ValueError(f"task_id={row.task_id!r} occurs twice")
                except (ValueError, msgspec.MsgspecError) as error:
                    raise UserError(f"{key}={path}, line {number}: {error}: mend the row or leave it out") from None
                self.ids.add(hash(str(row.task_id)))
                if not row.rules and self.without_rules is None:
                    self.without_rules = str(row.task_id)
                self._offsets.append(offset)
                self._levels.append(row.difficulty)
            offset += len(line)
        if not self._offsets:
            raise UserError(f"{key}={path} has no rows: give a JSONL file of tasks")

    def __len__(self) -> int:
        return len(self._offsets)

    def level(self, index: int) -> int:
        """Difficulty of a row."""
        return self._levels[index]

    def task(self, index: int, seed: int) -> Task:
        """The task of a row; `seed` means nothing."""
        self._file.seek(self._offsets[index])
        line = self._file.readline()
        name = str(_decoder.decode(line).task_id)
        level = self._levels[index]
        return Task(
            f"{ENVIRONMENT}/{name}", ENVIRONMENT, name, 0, self._config.horizon(level), level, line.decode().strip()
        )

    def practises(self, task: Task) -> bool:
        """Whether a task is one of the rows."""
        return task.environment == ENVIRONMENT and hash(task.name) in self.ids


def row_of(task: Task) -> Row:
    """What the task carries."""
    return _decoder.decode(task.data)


class WebGym(WebEnvironment):
    """Its sites are the open web (browser.allow_hosts); rules or a rubric judge decide."""

    @staticmethod
    def check(config: RunConfig) -> None:
        """Raises UserError for files that cannot be used together, or without the judge that they need."""
        tasks = config.tasks
        assert tasks.train_file is not None
        assert tasks.held_out_file is not None
        train = TaskFile(tasks.train_file, "tasks.train_file", tasks)
        held_out = TaskFile(tasks.held_out_file, "tasks.held_out_file", tasks)
        if common := len(train.ids & held_out.ids):
            raise UserError(
                f"tasks.held_out_file={tasks.held_out_file} shares {common} task_ids with tasks.train_file: take them out of "
                "one of the two, or held-out success would be measured on practised tasks"
            )
        if config.evaluation.episodes > len(held_out):
            raise UserError(
                f"evaluation.episodes={config.evaluation.episodes} exceeds the {len(held_out)} rows of tasks.held_out_file: "
                "give as many at most"
            )
        if config.judge.url is None:
            for file, key in ((train, "train_file"), (held_out, "held_out_file")):
                if file.without_rules is not None:
                    raise UserError(
                        f"tasks.{key} has the task {file.without_rules!r}, which a rubric judge decides, and judge.url=null: "
                        "give the URL of an OpenAI-compatible server"
                    )
        else:
            RubricJudge.check(config.judge)

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._rubric = RubricJudge(config.judge) if config.judge.url is not None else None
        self.judge = self._judge

    def start_url(self, task: Task) -> str:
        return row_of(task).url

    def utterance(self, task: Task) -> str:
        return row_of(task).task_name

    def selectors(self, task: Task) -> Sequence[str]:
        return [rule.selector for rule in row_of(task).rules if isinstance(rule, ElementRule)]

    async def _judge(self, evidence: Evidence) -> Verdict:
        row = row_of(evidence.task)
        if row.rules:
            return judge_by_rules(row.rules, evidence)
        assert self._rubric is not None
        return await self._rubric.judge(evidence, row.criteria, row.reference_answer)

    async def close(self) -> None:
        await super().close()
        if self._rubric is not None:
            await self._rubric.close()
