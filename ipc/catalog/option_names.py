"""Names of the options that families of models understand, as the protocols and the families both know them."""

from __future__ import annotations

SHARED_OPTIONS = frozenset(
    {
        "dimensions",
        "instruction",
        "is_query",
        "lora",
        "lora_id",
        "muvera",
        "output_dtype",
        "overflow_policy",
    }
)
"""Options of a catalog entry that frontends resolve into each request, whatever the family."""

TEXT_BESIDE_IMAGES = "text beside images"
"""In the list of what a model reads (`ModelStatus.uses`): the text of an item that has an image too."""

_PROMPTS = ("query_template", "document_template", "default_instruction", "prompts")

FAMILY_OPTIONS: dict[str, tuple[str, ...]] = {
    "dense": ("pooling", "normalize", *_PROMPTS),
    "static_embedding": ("normalize", *_PROMPTS),
    "bge_m3": ("score_mode", "score_weights", *_PROMPTS),
    "splade": ("query_encoding", "activation_function", "pooling_strategy", "max_terms", *_PROMPTS),
    "colbert": (
        "query_prefix",
        "document_prefix",
        "query_length",
        "document_length",
        "query_expansion",
        "attend_to_expansion",
        "skip_punctuation",
        *_PROMPTS,
    ),
    "clip": ("normalize", "text_template"),
    "siglip": ("normalize", "text_template"),
    "colpali": (),
    "colqwen2": ("min_pixels", "max_pixels"),
    "cross_encoder": ("activation",),
    "qwen3_reranker": (
        "positive_token",
        "negative_token",
        "pair_template",
        "prefix",
        "suffix",
        "activation",
        "default_instruction",
    ),
    "qwen3_vl_embedding": ("min_pixels", "max_pixels", "default_instruction"),
    "qwen3_vl_reranker": (
        "min_pixels",
        "max_pixels",
        "positive_token",
        "negative_token",
        "activation",
        "default_instruction",
    ),
    "causal": ("chat_template", "tool_format", "reasoning", "min_pixels", "max_pixels"),
    "detection": ("score_threshold",),
    "owlv2": ("score_threshold", "label_template"),
    "grounding_dino": ("box_threshold", "text_threshold"),
    "florence2": ("task", "max_new_tokens", "num_beams"),
    "donut": ("task", "max_new_tokens", "num_beams"),
    "lighton_ocr": ("task", "max_new_tokens", "num_beams"),
    "glm_ocr": ("task", "max_new_tokens", "num_beams"),
    "paddleocr_vl": ("task", "max_new_tokens", "num_beams"),
    "document_qa": ("top_k", "max_answer_tokens", "threshold"),
    "ner": ("aggregation_strategy", "threshold"),
    "text_classification": ("function_to_apply", "threshold", "top_k"),
    "nli_zero_shot": ("hypothesis_template", "multi_label", "threshold"),
    "gliclass": ("classification_type", "threshold"),
    "gliner2": ("threshold",),
    "gliner": (
        "threshold",
        "flat_ner",
        "multi_label",
        "merge_adjacent_entities",
        "relations",
        "relation_threshold",
        "adjacency_threshold",
    ),
}
"""Options of each built-in family (`AdapterSpec.options`)."""

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
"""Values of `overflow_policy`, and the value of `overflow` in a call for each."""
