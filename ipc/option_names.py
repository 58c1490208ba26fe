"""Names of the options that families of models understand, as the protocols and the families both know them."""

from __future__ import annotations

EXTRACT_OPTIONS = frozenset(
    {
        "adjacency_threshold",
        "aggregation_strategy",
        "box_threshold",
        "classification_type",
        "flat_ner",
        "function_to_apply",
        "hypothesis_template",
        "label_template",
        "max_answer_tokens",
        "max_new_tokens",
        "merge_adjacent_entities",
        "multi_label",
        "num_beams",
        "relation_threshold",
        "relations",
        "score_threshold",
        "task",
        "text_threshold",
        "threshold",
        "top_k",
    }
)
"""Options that some extract family understands."""

SCORE_OPTIONS = frozenset({"score_mode", "score_weights"})
"""Options that some score family understands."""

OVERFLOW_POLICIES = {
    "default": "truncate",
    "truncate_text": "truncate",
    "truncate_left": "truncate_left",
    "chunk": "chunk",
    "error": "error",
}
"""Values of `overflow_policy`, and what calls have for them (`overflow`)."""
