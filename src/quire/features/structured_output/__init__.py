"""Structured output: a grammar that a completion must match, as a mask over the vocabulary at every
token.

`quire.grammar.grammar` turns a request's `StructuredOutputsParams` into a grammar of llguidance's,
and refuses what it could not enforce. `compiler.py` compiles the grammar. `feature.py` follows the
running requests and builds their masks beside the device's work.
"""

from quire.features.structured_output.compiler import Compiler, CompilerConfig, build_compiler
from quire.features.structured_output.feature import GrammarFeature, NoGrammars, open_grammars

__all__ = [
    "Compiler",
    "CompilerConfig",
    "GrammarFeature",
    "NoGrammars",
    "build_compiler",
    "open_grammars",
]
