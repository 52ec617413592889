"""All HTTP routes for trainers."""

from __future__ import annotations

from quire.features.weight_updates import api, sglang_api, vllm_api

ROUTES = (*api.ROUTES, *sglang_api.ROUTES, *vllm_api.ROUTES)
