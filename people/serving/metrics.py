"""Counters and gauges of serving, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from people.feedback.records import AnswerRecord

# Upper ends of the classes of the histograms, in seconds.
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
MEDIA_TYPE = prometheus_client.CONTENT_TYPE_LATEST


class Metrics:
    """Counts by model and version, never by user. Its methods may be called from any thread.

    running: counts the requests that wait or are answered now.
    """

    def __init__(self, running: Callable[[], int]):
        self._registry = CollectorRegistry()
        own = dict(registry=self._registry)
        which = ("model", "version", "adapter")
        self._answers = Counter(
            "serving_answers", "Answers by how they ended.", (*which, "finish_reason"), **own
        )
        self._given = Counter("serving_given_tokens", "New tokens of prompts.", which, **own)
        self._sampled = Counter("serving_sampled_tokens", "Sampled tokens.", which, **own)
        self._first = Histogram(
            "serving_first_token_seconds",
            "From the request to the first token.",
            which,
            buckets=_SECONDS,
            **own,
        )
        self._whole = Histogram(
            "serving_answer_seconds",
            "From the request to the whole answer.",
            which,
            buckets=_SECONDS,
            **own,
        )
        self._refused = Counter(
            "serving_refused_requests", "Requests refused, by status.", ("status",), **own
        )
        gauge = Gauge("serving_running_requests", "Requests that wait or are answered.", **own)
        gauge.set_function(running)

    def answered(self, record: AnswerRecord) -> None:
        """An answer was recorded."""
        which = record.model, str(record.version), record.adapter
        self._answers.labels(*which, record.finish_reason).inc()
        self._given.labels(*which).inc(len(record.given))
        self._sampled.labels(*which).inc(len(record.tokens))
        if record.tokens:
            self._first.labels(*which).observe(record.first_token_s)
        self._whole.labels(*which).observe(record.answered_at - record.asked_at)

    def refused(self, status: int) -> None:
        """A request got an error."""
        self._refused.labels(str(status)).inc()

    def text(self) -> bytes:
        """All counts, as Prometheus reads them."""
        return prometheus_client.generate_latest(self._registry)
