//! Names of tensors on the Hub and in SAT, and how model-parallel ranks divide them.
//!
//! Every row of [`TABLE`] is read in both directions. `N` stands for a layer's number, `*` for one or more last
//! components.

/// How ranks divide the weights of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Division {
    /// Every rank has all of it.
    Whole,
    /// Rows, in so many equal groups.
    Column(usize),
    /// Rows, in three groups: queries, keys and values. With grouped keys and values, the first group is larger.
    QueryKeyValue,
    /// Columns; the bias is whole.
    Row,
    /// Rows, unless SAT found the vocabulary too small.
    Vocabulary,
}

use Division::{Column, QueryKeyValue, Row, Vocabulary, Whole};

const TABLE: &[(&str, &str, Division)] = &[
    (
        "model.embed_tokens.*",
        "transformer.word_embeddings.*",
        Vocabulary,
    ),
    (
        "model.layers.N.input_layernorm.*",
        "transformer.layers.N.input_layernorm.*",
        Whole,
    ),
    (
        "model.layers.N.post_attention_layernorm.*",
        "transformer.layers.N.post_attention_layernorm.*",
        Whole,
    ),
    (
        "model.layers.N.post_cross_attention_layernorm.*",
        "transformer.layers.N.post_cross_attention_layernorm.*",
        Whole,
    ),
    (
        "model.layers.N.self_attn.language_expert_query_key_value.*",
        "transformer.layers.N.attention.query_key_value.*",
        QueryKeyValue,
    ),
    (
        "model.layers.N.self_attn.language_expert_dense.*",
        "transformer.layers.N.attention.dense.*",
        Row,
    ),
    (
        "model.layers.N.self_attn.vision_expert_query_key_value.*",
        "mixins.rotary.vision_query_key_value_list.N.*",
        QueryKeyValue,
    ),
    (
        "model.layers.N.self_attn.vision_expert_dense.*",
        "mixins.rotary.vision_dense_list.N.*",
        Row,
    ),
    (
        "model.layers.N.mlp.language_mlp.gate_proj.*",
        "mixins.mlp.gate_proj.N.*",
        Column(1),
    ),
    (
        "model.layers.N.mlp.language_mlp.up_proj.*",
        "transformer.layers.N.mlp.dense_h_to_4h.*",
        Column(1),
    ),
    (
        "model.layers.N.mlp.language_mlp.down_proj.*",
        "transformer.layers.N.mlp.dense_4h_to_h.*",
        Row,
    ),
    (
        "model.layers.N.mlp.vision_mlp.gate_proj.*",
        "mixins.mlp.vision_gate_proj.N.*",
        Column(1),
    ),
    (
        "model.layers.N.mlp.vision_mlp.up_proj.*",
        "mixins.mlp.vision_dense_h_to_4h_list.N.*",
        Column(1),
    ),
    (
        "model.layers.N.mlp.vision_mlp.down_proj.*",
        "mixins.mlp.vision_dense_4h_to_h_list.N.*",
        Row,
    ),
    (
        "model.layers.N.cross_attn.query.*",
        "transformer.layers.N.cross_attention.query.*",
        Column(1),
    ),
    (
        "model.layers.N.cross_attn.key_value.*",
        "transformer.layers.N.cross_attention.key_value.*",
        Column(2),
    ),
    (
        "model.layers.N.cross_attn.dense.*",
        "transformer.layers.N.cross_attention.dense.*",
        Row,
    ),
    ("model.norm.*", "transformer.final_layernorm.*", Whole),
    ("lm_head.*", "mixins.lm.lm_head.*", Column(1)),
    (
        "model.vision.patch_embedding.proj.*",
        "mixins.eva.vit_model.mixins.patch_embedding.proj.*",
        Whole,
    ),
    (
        "model.vision.patch_embedding.cls_embedding",
        "mixins.eva.vit_model.transformer.word_embeddings.weight",
        Whole,
    ),
    (
        "model.vision.patch_embedding.position_embedding.*",
        "mixins.eva.vit_model.transformer.position_embeddings.*",
        Whole,
    ),
    (
        "model.vision.transformer.layers.N.attention.query_key_value.*",
        "mixins.eva.vit_model.transformer.layers.N.attention.query_key_value.*",
        QueryKeyValue,
    ),
    (
        "model.vision.transformer.layers.N.attention.dense.*",
        "mixins.eva.vit_model.transformer.layers.N.attention.dense.*",
        Row,
    ),
    (
        "model.vision.transformer.layers.N.mlp.fc1.*",
        "mixins.eva.vit_model.transformer.layers.N.mlp.dense_h_to_4h.*",
        Column(1),
    ),
    (
        "model.vision.transformer.layers.N.mlp.fc2.*",
        "mixins.eva.vit_model.transformer.layers.N.mlp.dense_4h_to_h.*",
        Row,
    ),
    (
        "model.vision.transformer.layers.N.input_layernorm.*",
        "mixins.eva.vit_model.transformer.layers.N.input_layernorm.*",
        Whole,
    ),
    (
        "model.vision.transformer.layers.N.post_attention_layernorm.*",
        "mixins.eva.vit_model.transformer.layers.N.post_attention_layernorm.*",
        Whole,
    ),
    ("model.vision.boi", "mixins.eva.boi", Whole),
    ("model.vision.eoi", "mixins.eva.eoi", Whole),
    ("model.vision.pos_embed", "mixins.eva.pos_embed", Whole),
    ("model.vision.conv.*", "mixins.eva.conv.*", Whole),
    (
        "model.vision.linear_proj.*",
        "mixins.eva.linear_proj.*",
        Whole,
    ),
    ("model.cross_vision.*", "mixins.encoder.*", Whole),
];

/// The rotary frequencies in SAT, one tensor for all layers.
pub(crate) const FREQUENCIES: &str = "mixins.rotary.rotary_emb.inv_freq";

/// Name on the Hub of the rotary frequencies of a layer.
pub(crate) fn frequencies_of(layer: usize) -> String {
    format!("model.layers.{layer}.self_attn.rotary_emb.inv_freq")
}

/// Whether `hub` are the rotary frequencies of a layer.
pub(crate) fn is_frequencies(hub: &str) -> bool {
    hub.ends_with(".self_attn.rotary_emb.inv_freq")
}

/// Name on the Hub, and division, of the tensor `sat`. [`FREQUENCIES`] has several names and is not in the table.
pub(crate) fn of_sat(sat: &str) -> Option<(String, Division)> {
    let rows = TABLE.iter();
    let mut found = rows.filter_map(|(hub, own, cut)| Some((renamed(sat, own, hub)?, *cut)));
    found.next()
}

/// Name in SAT, and division, of the tensor `hub`.
pub(crate) fn of_hub(hub: &str) -> Option<(String, Division)> {
    if is_frequencies(hub) {
        return Some((FREQUENCIES.to_owned(), Whole));
    }
    let rows = TABLE.iter();
    let mut found = rows.filter_map(|(own, sat, cut)| Some((renamed(hub, own, sat)?, *cut)));
    found.next()
}

/// `name`, which the pattern `from` describes, by the pattern `to`.
fn renamed(name: &str, from: &str, to: &str) -> Option<String> {
    let (from, is_prefix) = match from.strip_suffix(".*") {
        Some(from) => (from, true),
        None => (from, false),
    };
    let mut parts = name.split('.');
    let mut layer = "";
    for pattern in from.split('.') {
        let part = parts.next()?;
        match pattern {
            "N" => {
                let canonical = part.parse::<usize>().ok()?.to_string() == part;
                layer = canonical.then_some(part)?;
            }
            _ => (pattern == part).then_some(())?,
        }
    }
    let rest: Vec<&str> = parts.collect();
    (rest.is_empty() != is_prefix).then_some(())?;
    let parts = to.split('.').flat_map(|pattern| match pattern {
        "N" => vec![layer],
        "*" => rest.clone(),
        part => vec![part],
    });
    Some(parts.collect::<Vec<_>>().join("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_both_ways_and_to_one_place() {
        for (hub, sat, division) in TABLE {
            let name = |pattern: &str| pattern.replace(".N", ".12").replace('*', "weight");
            assert_eq!(of_hub(&name(hub)), Some((name(sat), *division)), "{hub}");
            assert_eq!(of_sat(&name(sat)), Some((name(hub), *division)), "{sat}");
        }
        let unknown = [
            "mixins.unused.alias",
            "transformer.layers.01.input_layernorm.weight",
            "mixins.eva.vit_model.x",
            "lm_head",
        ];
        assert!(unknown.iter().all(|name| of_sat(name).is_none()));
        assert_eq!(of_hub("lm_head"), None);
    }
}
