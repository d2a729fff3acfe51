//! Saved adapters that a run or an answer starts from, checked against the model.

use crate::error::{ErrorCode, Failure, failures};
use crate::lang::{Text, both, text};
use engine::ParamSpec;
use models::WeightSource;
use models::adapter::Adapter;
use models::params::{ADAPTER_PREFIX, is_added};
use std::collections::BTreeSet;
use std::path::Path;

/// Maximal number of tensors listed that do not fit the model.
const LISTED: usize = 3;

/// Opens the adapters and trained tensors in `dir` and checks that they belong to the weights `base`.
pub(crate) fn open_adapter(dir: &Path, base: &WeightSource) -> Result<Adapter, Failure> {
    let adapter = Adapter::open(dir).map_err(|error| {
        failures::adapter(
            text!("cannot use the adapter {}", "无法使用适配器 {}", dir.display()),
            &error,
            both("give --adapter a checkpoint-N directory with adapter_model.safetensors or trained.safetensors", "请把含有 adapter_model.safetensors 或 trained.safetensors 的 checkpoint-N 目录交给 --adapter"),
        )
    })?;
    let misfits = adapter.misfits(base);
    if !misfits.is_empty() {
        let misfits: Vec<Text> = misfits.iter().map(Text::literal).collect();
        return Err(stranger(&adapter, &misfits));
    }
    // p-tuning prefixes have no base weight; they are part of the model as built.
    let lost = adapter
        .strangers(base)
        .filter(|name| !is_added(name) || name.starts_with(ADAPTER_PREFIX));
    let strangers: Vec<Text> = lost.map(no_place).collect();
    match strangers.is_empty() {
        true => Ok(adapter),
        false => Err(stranger(&adapter, &strangers)),
    }
}

fn no_place(name: &str) -> Text {
    text!("the model has no tensor {name}", "模型没有张量 {name}")
}

/// Checks that every tensor of the adapter is a parameter of the model with the same shape.
pub(crate) fn check_shapes(adapter: &Adapter, params: &[ParamSpec]) -> Result<(), Failure> {
    let known: BTreeSet<&str> = params.iter().map(|param| &*param.name).collect();
    let lost = adapter.names().filter(|name| !known.contains(name));
    let mut reasons: Vec<Text> = lost.map(no_place).collect();
    for param in params {
        match adapter.shape(&param.name) {
            Some(got) if got != param.shape.dims() => reasons.push(text!(
                "{} is {got:?}, the model needs {}",
                "{} 的形状为 {got:?}，模型需要 {}",
                param.name,
                param.shape
            )),
            None if is_added(&param.name) => {
                reasons.push(text!("{} is missing", "缺少 {}", param.name));
            }
            _ => {}
        }
    }
    match reasons.is_empty() {
        true => Ok(()),
        false => Err(stranger(adapter, &reasons)),
    }
}

/// Failure of adapters that do not belong to the model, for these reasons.
pub(crate) fn stranger(adapter: &Adapter, reasons: &[Text]) -> Failure {
    let mut failure = Failure::new(
        ErrorCode::ModelFiles,
        text!(
            "the adapter {} does not belong to this model",
            "适配器 {} 不属于该模型",
            adapter.dir().display()
        ),
        text!(
            "{} of its tensors do not fit the model",
            "它有 {} 个张量与模型不匹配",
            reasons.len()
        ),
    );
    for reason in reasons.iter().take(LISTED) {
        failure = failure.evidence(reason.clone());
    }
    if reasons.len() > LISTED {
        failure = failure.evidence(text!("and {} more", "另有 {} 个", reasons.len() - LISTED));
    }
    let base = adapter
        .config()
        .and_then(|c| c.base_model_name_or_path.clone())
        .filter(|base| !base.trim().is_empty());
    match base {
        Some(base) => failure.next(text!(
            "use --model {base}, the model that the adapter was trained on",
            "请使用 --model {base}，即训练该适配器所用的模型"
        )),
        None => failure.next(both(
            "give --model the directory of the model that the adapter was trained on",
            "请把训练该适配器所用的模型的目录交给 --model",
        )),
    }
}

/// Checks that a run which starts from these adapters trains all of them: what it does not train, it would not save.
pub(crate) fn check_trained(adapter: &Adapter, params: &[ParamSpec]) -> Result<(), Failure> {
    let frozen = params.iter().filter(|param| !param.trainable);
    let frozen: Vec<&str> = frozen
        .map(|param| &*param.name)
        .filter(|name| adapter.has(name))
        .collect();
    let Some(first) = frozen.first() else {
        return Ok(());
    };
    Err(Failure::usage(
        text!(
            "{} has trained tensors that this run freezes",
            "{} 中有本次运行冻结的已训练张量",
            adapter.dir().display()
        ),
        both(
            "checkpoints have what the run trains, so they would lack these tensors",
            "检查点只含运行训练的内容，因此会缺少这些张量",
        ),
    )
    .evidence(text!(
        "{} tensors, the first {first}",
        "{} 个张量，第一个是 {first}",
        frozen.len()
    ))
    .next(both(
        "train them too, with --modules-to-save NAMES or --train PARTS",
        "请用 --modules-to-save NAMES 或 --train PARTS 同时训练它们",
    ))
    .next(both(
        "or merge them into a model first: `launcher export CHECKPOINT --merge --output DIR`",
        "或先把它们合并为模型：`launcher export CHECKPOINT --merge --output DIR`",
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_that_only_peft_has_are_merged_with_peft() {
        let directory = tempfile::tempdir().expect("temp dir");
        let refused = |config: &str| {
            let file = directory.path().join("adapter_config.json");
            std::fs::write(file, config).expect("written");
            let error = models::adapter::AdapterConfig::open(directory.path()).expect_err(config);
            failures::adapter("title".into(), &error, both("elsewhere", "别处")).to_string()
        };
        for other in [
            "\"use_dora\": true",
            "\"bias\": \"all\"",
            "\"init_lora_weights\": \"pissa\"",
            "\"trainable_token_indices\": [1]",
        ] {
            let text = refused(&format!("{{\"r\": 2, \"lora_alpha\": 8, {other}}}"));
            assert!(
                text.contains("merge_and_unload") && !text.contains("elsewhere"),
                "{text}"
            );
        }
        assert!(refused("{").contains("elsewhere"));
    }
}
