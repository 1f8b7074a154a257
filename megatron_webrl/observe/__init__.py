"""Metrics, traces and pictures of a run.  Sinks are handed in; none of them can stop a run."""

from megatron_webrl.observe.metrics import JsonlSink, MetricsLogger, MetricsSink, WandbSink, read_jsonl
from megatron_webrl.observe.pictures import Overlap, Rate, success_curve, timeline
from megatron_webrl.observe.statistics import clustered, wilson
from megatron_webrl.observe.trace import Span, Tracer, export_chrome, read_spans

__all__ = [
    "JsonlSink",
    "MetricsLogger",
    "MetricsSink",
    "Overlap",
    "Rate",
    "Span",
    "Tracer",
    "WandbSink",
    "clustered",
    "export_chrome",
    "read_jsonl",
    "read_spans",
    "success_curve",
    "timeline",
    "wilson",
]
