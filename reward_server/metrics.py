"""What Prometheus is told. Each app has a registry of its own."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

UNKNOWN = "unknown"  # the reward of requests that name none of ours: their labels are not kept
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "reward_server_requests",
            "Requests to /v1/score by HTTP status; 499: the client went away",
            ["reward", "status"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            "reward_server_request_seconds",
            "From the request's header to its answer",
            ["reward"],
            buckets=SECONDS,
            registry=registry,
        )
        self.images_scored = Counter(
            "reward_server_images_scored",
            "Images that got a score",
            ["reward"],
            registry=registry,
        )
        self.images_failed = Counter(
            "reward_server_images_failed",
            "Images that were given to the scorer and got no score",
            ["reward"],
            registry=registry,
        )
        self.queue_images = Gauge(
            "reward_server_queue_images",
            "Images that are accepted and not answered yet",
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
        return generate_latest(self.registry)
