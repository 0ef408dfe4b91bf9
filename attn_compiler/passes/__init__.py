"""The passes over a graph.

The rooms, the lowest first; each may import those above it in this list:

    graph/             what all steps work on: the unit, its mirror of ATen ops, sites, axes, views, values
    spelling/          other spellings become plain ones: FlexAttention, DTensors, checkpoints, calls of libraries
    matching/          which nodes are an attention (patterns/), and what only looks like one
    recovering/        what masks and score changes mean (reading/ reads an element of each op's result), and the spec
    writing/           the decision, layouts, the kernel's nodes, and the summary for the report
    unpad/             by option: padding is taken out of the graph, which is matched again then
    context_parallel/  by option: a sequence is spread over ranks, and the graph is matched again then
    rewrites/          what was done to a graph, kept on disk
    pipeline/          every step in order (steps.py), what carries them out (running.py), what the backend asks for (rewriting.py)

What fails on one site, or one call, leaves that as it was (graph/faults.py);
what fails otherwise leaves the model's graph as it was.
"""

from attn_compiler.passes.pipeline.rewriting import Rewritten, rewrite, run_pipeline

__all__ = ["Rewritten", "rewrite", "run_pipeline"]
