"""The routes that turn texts into vectors and scores."""

from __future__ import annotations

from quire.server.apis.route import Route
from quire.server.apis.scoring.classes import ClassifyRequest, ClassList, classify
from quire.server.apis.scoring.embeddings import (
    EmbeddingList,
    EmbeddingRequest,
    PoolingList,
    PoolingRequest,
    embeddings,
    pooling,
)
from quire.server.apis.scoring.scores import (
    RerankAnswer,
    RerankRequest,
    ScoreList,
    ScoreRequest,
    rerank,
    score,
)

ROUTES = (
    Route("post", "/v1/embeddings", embeddings, "Turn texts into vectors",
          EmbeddingRequest, EmbeddingList, counted=True),
    Route("post", "/pooling", pooling, "The same, with a choice of pooling",
          PoolingRequest, PoolingList, counted=True),
    Route("post", "/classify", classify, "Classify texts",
          ClassifyRequest, ClassList, counted=True),
    *(Route("post", path, score, "Score pairs of texts", ScoreRequest, ScoreList, counted=True)
      for path in ("/score", "/v1/score")),
    # Cohere's clients ask under /v1 and /v2.
    *(Route("post", path, rerank, "Order documents by relevance",
            RerankRequest, RerankAnswer, counted=True)
      for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
)  # fmt: skip
