"""The HTTP routes for trainers: Quire's own, and thin ones by the names of SGLang, vLLM and TRL."""

from __future__ import annotations

from quire.features.weight_updates.api import sglang, vllm, weight_routes

ROUTES = (*weight_routes.ROUTES, *sglang.ROUTES, *vllm.ROUTES)
