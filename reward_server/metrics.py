"""Prometheus metrics, in one registry per application."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

UNKNOWN = "unknown"  # label of requests for unknown rewards, so that labels stay bounded
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The Prometheus metrics of a server: those of scoring, by reward, and those of the process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "reward_server_requests",
            "Requests to /v1/score by HTTP status; 499: client disconnected",
            ["reward", "status"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            "reward_server_request_seconds",
            "Time from the request's headers to its response",
            ["reward"],
            buckets=SECONDS,
            registry=registry,
        )
        self.images_scored = Counter(
            "reward_server_images_scored", "Images that got a score", ["reward"], registry=registry
        )
        self.images_failed = Counter(
            "reward_server_images_failed",
            "Images that the scorer failed to score",
            ["reward"],
            registry=registry,
        )
        self.queue_images = Gauge(
            "reward_server_queue_images",
            "Images that are queued or being scored",
            ["reward"],
            registry=registry,
        )
        self.batch_images = Histogram(
            "reward_server_batch_images",
            "Images in one call of the scorer",
            ["reward"],
            buckets=BATCH_SIZES,
            registry=registry,
        )
        self.scorer_seconds = Histogram(
            "reward_server_scorer_seconds",
            "Time of one call of the scorer",
            ["reward"],
            buckets=SECONDS,
            registry=registry,
        )

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)
