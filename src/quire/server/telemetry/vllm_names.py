"""Metrics under vLLM's names, for dashboards that were made for vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

NAMES = {
    "quire_requests_running": ("num_requests_running",),
    "quire_requests_waiting": ("num_requests_waiting",),
    "quire_time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "quire_inter_token_latency_seconds": (
        "inter_token_latency_seconds",
        "time_per_output_token_seconds",
    ),
    "quire_request_seconds": ("e2e_request_latency_seconds",),
    "quire_request_queue_seconds": ("request_queue_time_seconds",),
    "quire_request_prefill_seconds": ("request_prefill_time_seconds",),
    "quire_request_prompt_tokens": ("request_prompt_tokens",),
    "quire_request_output_tokens": ("request_generation_tokens",),
    "quire_prompt_tokens": ("prompt_tokens",),
    "quire_generation_tokens": ("generation_tokens",),
    "quire_requests_finished": ("request_success",),
    "quire_prefix_query_tokens": ("prefix_cache_queries",),
    "quire_prefix_hit_tokens": ("prefix_cache_hits",),
    "quire_preemptions": ("num_preemptions",),
    "quire_spec_decode_drafts": ("spec_decode_num_drafts",),
    "quire_spec_decode_draft_tokens": ("spec_decode_num_draft_tokens",),
    "quire_spec_decode_accepted_tokens": ("spec_decode_num_accepted_tokens",),
    "quire_spec_decode_accepted_tokens_per_pos": ("spec_decode_num_accepted_tokens_per_pos",),
}
"""Maps a metric's name to vLLM's names for the same quantity."""
_LABELS = {"reason": "finished_reason"}
_BLOCKS = "quire_kv_blocks"


class VllmNames(Collector):
    """Collects metrics a second time, under vLLM's names and with its label `model_name`.

    Args:
        source: the metrics to rename. It must not contain this collector.
        model: the served model's name.
    """

    def __init__(self, source: Collector, model: str) -> None:
        self._source = source
        self._model = model

    def collect(self) -> Iterator[Metric]:
        for metric in self._source.collect():
            for name in NAMES.get(metric.name, ()):
                yield self._rename(metric, f"vllm:{name}")
            if metric.name == _BLOCKS:
                yield self._usage(metric.samples)

    def _rename(self, metric: Metric, name: str) -> Metric:
        renamed = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
            renamed.samples.append(
                sample._replace(
                    name=name + sample.name.removeprefix(metric.name),
                    labels={**labels, "model_name": self._model},
                )
            )
        return renamed

    def _usage(self, samples: Iterable[Sample]) -> Metric:
        """Returns the share of KV blocks in use in the fullest KV group."""
        blocks: dict[str, dict[str, float]] = {}
        for sample in samples:
            blocks.setdefault(sample.labels["group"], {})[sample.labels["state"]] = sample.value
        shares = [states["used"] / max(1.0, sum(states.values())) for states in blocks.values()]
        usage = Metric("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "gauge")
        labels = {"model_name": self._model}
        usage.add_sample(usage.name, labels, max(shares, default=0.0))
        return usage
