//! Check whether a checkpoint can continue this run. The supervisor makes it before anything changes on disk.

use crate::cli::Args;
use crate::config::{CONFIG_FILE, Lora, Origin, Resume, RunConfig, RunPlan, Trainable};
use crate::data::Sampler;
use crate::error::{ErrorCode, Failure, failures};
use crate::lang::{Both, Lang, Text, both, text};
use crate::model::optimizer::rule;
use crate::model::setup::precision;
use crate::report::checkpoints::advise_intact;
use crate::ui::Event;
use engine::checkpoint::{self, Checkpoint};
use engine::{ParamId, Plan};
use models::Family;
use models::adapter::ADAPTER_CONFIG;
use optim::Optimizer;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Position of the training loop in a checkpoint.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Position {
    /// Completed steps of the schedule, skipped updates included.
    pub(crate) done: u64,
    pub(crate) total_tokens: u64,
    pub(crate) exact_match_before: Option<f64>,
}

/// Files by which the checkpoints of other trainers are known: name, and what saved it.
const OTHER_TRAINERS: [(&str, Both); 8] = [
    (
        "training_args.bin",
        both("a Hugging Face trainer", "Hugging Face 训练器"),
    ),
    (
        "rng_state.pth",
        both("a Hugging Face trainer", "Hugging Face 训练器"),
    ),
    (
        "rng_state_0.pth",
        both("a Hugging Face trainer", "Hugging Face 训练器"),
    ),
    (
        "optimizer.pt",
        both("a Hugging Face trainer", "Hugging Face 训练器"),
    ),
    ("zero_to_fp32.py", both("DeepSpeed", "DeepSpeed")),
    (
        "mp_rank_00_model_states.pt",
        both("DeepSpeed or SAT", "DeepSpeed 或 SAT"),
    ),
    ("pytorch_model_fsdp.bin", both("FSDP", "FSDP")),
    (".metadata", both("torch.distributed", "torch.distributed")),
];

/// The directory to resume from. `None` if the configuration asks for none or none exists.
///
/// # Errors
/// The directory was saved by another trainer, or has an adapter that is not implemented.
pub(crate) fn directory(config: &RunConfig) -> Result<Option<PathBuf>, Failure> {
    let directory = match &config.resume {
        Resume::No => None,
        Resume::Latest => checkpoint::find_latest(&config.output)
            .map_err(|e| failures::checkpoint(both("resume", "续训"), &e))?,
        Resume::From(path) => Some(path.clone()),
    };
    if let Some(directory) = &directory {
        failures::check_directory(doing(directory), directory)?;
        refuse_foreign(&doing(directory), directory)?;
    }
    Ok(directory)
}

/// Fails if another program saved `directory`, so that it has no state to continue from. `doing` is the step that needs it.
pub(crate) fn refuse_foreign(doing: &Text, directory: &Path) -> Result<(), Failure> {
    let has = |name: &str| directory.join(name).exists();
    // This program's own checkpoints have both; a damaged one may lack the first.
    if has("MANIFEST.json") || has("state") {
        return Ok(());
    }
    let next = match (has(ADAPTER_CONFIG), has("config.json")) {
        (true, _) => both(
            "merge the adapter into its base model in peft, give the result to --model, and train a new adapter without --resume",
            "请用 peft 把适配器合并到基座模型中，把结果交给 --model，并去掉 --resume 训练新的适配器",
        ),
        (false, true) => both(
            "give it to --model instead: training then begins at its weights, with a new optimizer",
            "请改为把它交给 --model：训练会从它的权重开始，优化器是新的",
        ),
        (false, false) => both(
            "convert it to a Hugging Face directory with the tools of its trainer, and give that to --model",
            "请用其训练器的工具把它转换为 Hugging Face 目录，再交给 --model",
        ),
    };
    let other = OTHER_TRAINERS.iter().find(|(name, _)| has(name));
    let global = std::fs::read_dir(directory).ok().is_some_and(|entries| {
        let mut names = entries.flatten().map(|entry| entry.file_name());
        names.any(|name| name.to_string_lossy().starts_with("global_step"))
    });
    let saved_by = match other {
        Some((name, trainer)) => text!(
            "{name} shows that {trainer} saved it",
            "{name} 表明它是由 {trainer} 保存的"
        ),
        None if global => both(
            "its global_step directory shows that DeepSpeed saved it",
            "其中的 global_step 目录表明它是由 DeepSpeed 保存的",
        )
        .into(),
        None if has(ADAPTER_CONFIG) => both(
            "it is an adapter as peft saves it, without the state of an optimizer",
            "这是 peft 保存的适配器，没有优化器状态",
        )
        .into(),
        None if has("config.json") => both(
            "it is a model directory, without the state of an optimizer",
            "这是模型目录，没有优化器状态",
        )
        .into(),
        None => return Ok(()),
    };
    let title = text!(
        "cannot {doing}: this program did not save it",
        "无法{doing}：它不是由本程序保存的"
    );
    Err(Failure::new(ErrorCode::Resume, title, saved_by).next(next))
}

/// Opens the checkpoint to resume from. `None` if the configuration asks for none or none exists.
pub(crate) fn open(config: &RunConfig) -> Result<Option<Checkpoint>, Failure> {
    directory(config)?
        .map(|directory| {
            Checkpoint::open(&directory)
                .map_err(|e| advise_intact(failures::checkpoint(doing(&directory), &e), &directory))
        })
        .transpose()
}

/// The configuration with what the checkpoint's run trained, for every setting of `args` that is absent: parts, adapters
/// and the learning rate, whose default depends on adapters.
pub(crate) fn continued(mut config: RunConfig, args: &Args) -> RunConfig {
    let run = match &config.resume {
        Resume::No => None,
        Resume::Latest => match checkpoint::find_latest(&config.output) {
            Ok(Some(_)) => Some(config.output.clone()),
            Ok(None) | Err(_) => None,
        },
        Resume::From(path) => path.parent().map(Path::to_owned),
    };
    // Without a readable configuration the flags decide, and a difference from the checkpoint is refused.
    let Some(Ok(saved)) = run.map(|run| RunPlan::load_from(&run.join(CONFIG_FILE))) else {
        return config;
    };
    let mut trained = saved.trainable.clone();
    // Earlier versions did not write the modules of the family's published script.
    if let (Some(lora), Ok(family)) = (&mut trained.lora, Family::of(&saved.model_dir())) {
        let modules = lora.modules_to_save(family, trained.tune_vision);
        lora.modules_to_save = Some(modules);
    }
    config.trainable = parts(config.trainable, &trained, args);
    config.quantize = config.quantize.or_else(|| saved.quantize.clone());
    if args.learning_rate.is_none() {
        config.optimizer.learning_rate = saved.optimizer.learning_rate;
    }
    config.with_zero(args.zero)
}

/// The value of a flag that is given, else the saved one.
fn pick<T: Clone>(is_given: bool, own: T, saved: &T) -> T {
    if is_given { own } else { saved.clone() }
}

fn parts(own: Trainable, saved: &Trainable, args: &Args) -> Trainable {
    Trainable {
        tune_vision: pick(
            args.tune_vision.is_some(),
            own.tune_vision,
            &saved.tune_vision,
        ),
        tune_llm: pick(args.tune_llm.is_some(), own.tune_llm, &saved.tune_llm),
        train: pick(args.train.is_some(), own.train, &saved.train),
        freeze: pick(args.freeze.is_some(), own.freeze, &saved.freeze),
        learning_rates: pick(args.lr.is_some(), own.learning_rates, &saved.learning_rates),
        lora: match (own.lora, &saved.lora) {
            (None, saved) if args.use_lora.is_none() => saved.clone(),
            (Some(own), Some(saved)) => Some(adapters(own, saved, args)),
            (own, _) => own,
        },
        ptuning_tokens: pick(
            args.ptuning_tokens.is_some(),
            own.ptuning_tokens,
            &saved.ptuning_tokens,
        ),
    }
}

fn adapters(own: Lora, saved: &Lora, args: &Args) -> Lora {
    Lora {
        lora_rank: pick(args.lora_rank.is_some(), own.lora_rank, &saved.lora_rank),
        lora_alpha: pick(args.lora_alpha.is_some(), own.lora_alpha, &saved.lora_alpha),
        use_rslora: pick(args.use_rslora.is_some(), own.use_rslora, &saved.use_rslora),
        loraplus_lr_ratio: pick(
            args.loraplus_lr_ratio.is_some(),
            own.loraplus_lr_ratio,
            &saved.loraplus_lr_ratio,
        ),
        lora_dropout: pick(
            args.lora_dropout.is_some(),
            own.lora_dropout,
            &saved.lora_dropout,
        ),
        target_modules: pick(
            args.lora_target_modules.is_some(),
            own.target_modules,
            &saved.target_modules,
        ),
        per_projection: pick(
            args.lora_per_projection.is_some(),
            own.per_projection,
            &saved.per_projection,
        ),
        layers: pick(args.lora_layers.is_some(), own.layers, &saved.layers),
        modules_to_save: pick(
            args.modules_to_save.is_some(),
            own.modules_to_save,
            &saved.modules_to_save,
        ),
        adapter: pick(args.adapter.is_some(), own.adapter, &saved.adapter),
    }
}

/// Name of the action for failure messages: `resume DIRECTORY`.
pub(crate) fn doing(directory: &Path) -> Text {
    text!("resume {}", "从 {} 继续", directory.display())
}

/// Verifies every byte of the checkpoint against its hash, and its contents against this run.
pub(crate) fn check(
    config: &RunConfig,
    plan: &Plan,
    sampler: &Sampler,
    total_steps: u64,
) -> Result<(), Failure> {
    let Some(checkpoint) = open(config)? else {
        return Ok(());
    };
    let directory = checkpoint.directory();
    let doing = doing(directory);
    checkpoint
        .verify()
        .map_err(|e| advise_intact(failures::checkpoint(&doing, &e), directory))?;
    let saved = checkpoint.meta().get("precision").and_then(Value::as_str);
    let asked = precision(config).name();
    if let Some(saved) = saved.filter(|saved| *saved != asked) {
        return Err(Failure::new(
            ErrorCode::Resume,
            text!(
                "cannot {doing}: it was saved in another precision",
                "无法{doing}：保存时使用的是另一种精度"
            ),
            both(
                "the optimizer state of one precision cannot continue in another",
                "一种精度的优化器状态不能用另一种精度继续",
            ),
        )
        .evidence(text!(
            "saved with {saved}, now {asked}",
            "保存时为 {saved}，现在为 {asked}"
        ))
        .next(Text::literal(format_args!("--precision {saved}"))));
    }
    engine::check_trained(plan, &checkpoint).map_err(|e| failures::engine(&doing, &e))?;
    same_states(config, plan, &checkpoint)?;
    position(config, directory, checkpoint.meta(), sampler, total_steps).map(drop)
}

/// Checks that the checkpoint has every optimizer state of this run in its number format.
fn same_states(config: &RunConfig, plan: &Plan, checkpoint: &Checkpoint) -> Result<(), Failure> {
    let slots = rule(config).slots(plan.config().precision);
    let params = plan.spec().params.iter().enumerate();
    for (id, param) in params.filter(|(_, param)| param.trainable) {
        for (kind, dtype, _) in plan.state_tensors(ParamId(id as u32), slots) {
            let saved = checkpoint.tensor(kind, &param.name);
            if saved.is_some_and(|saved| saved.dtype == dtype) {
                continue;
            }
            let found = saved.map_or_else(
                || both("nothing", "没有该状态").into(),
                |saved| Text::literal(saved.dtype),
            );
            let eight_bit = config.numbers.eight_bit;
            return Err(Failure::new(
                ErrorCode::Resume,
                text!(
                    "cannot {}: its optimizer states have another number format",
                    "无法{}：它的优化器状态使用另一种数值格式",
                    doing(checkpoint.directory())
                ),
                both(
                    "moments of one format cannot continue in another",
                    "一种格式的动量不能用另一种格式继续",
                ),
            )
            .evidence(text!(
                "{kind} of {}: saved as {found}, now {dtype}",
                "{} 的 {kind}：保存时为 {found}，现在为 {dtype}",
                param.name
            ))
            .next(match eight_bit {
                true => both("--moments full", "--moments full"),
                false => both(
                    "the same --moments and --pure-bf16-moments as before",
                    "请使用与之前相同的 --moments 和 --pure-bf16-moments",
                ),
            }));
        }
    }
    Ok(())
}

/// Key of the manifest's metadata with what the run trained on.
pub(crate) const ORIGIN: &str = "origin";
/// Key of the manifest's metadata with the differences that `--resume-anyway` accepted.
pub(crate) const RESUMED_ANYWAY: &str = "resumed_anyway";
/// Key in a checkpoint's metadata for the budget of tokens of a micro-batch.
pub(crate) const TOKENS_PER_BATCH: &str = "tokens_per_batch";
/// Key in a checkpoint's metadata for the samples that the steps of a run with such a budget have used.
pub(crate) const SAMPLES_USED: &str = "samples_used";
/// Flag that accepts another base or other data.
const ANYWAY: &str = "--resume-anyway";

/// Compares what the checkpoint's run trained on with what this one does. Returns the differences that `--resume-anyway`
/// accepted, those of earlier runs first.
///
/// # Errors
/// The base weights, the samples or the rank of the adapters differ (exit 9).
pub(crate) fn compare(
    config: &RunConfig,
    now: &Origin,
    samples: usize,
    show: &mut dyn FnMut(Event),
) -> Result<Vec<String>, Failure> {
    let Some(checkpoint) = open(config)? else {
        return Ok(Vec::new());
    };
    let (directory, meta) = (checkpoint.directory(), checkpoint.meta());
    let list = |value: &Value| serde_json::from_value::<Vec<String>>(value.clone()).ok();
    let mut accepted = meta.get(RESUMED_ANYWAY).and_then(list).unwrap_or_default();
    let mut broken: Vec<Text> = Vec::new();
    if let Some(order) = other_order(config, meta, samples) {
        broken.extend(order);
    }
    let saved = meta.get(ORIGIN).cloned().map(serde_json::from_value);
    match saved.and_then(Result::ok) {
        Some(saved) => {
            broken.extend(other_origin(&saved, now));
            for text in other_settings(config, directory, &saved, now)? {
                show(Event::Warning { text });
            }
        }
        None => show(Event::Info {
            label: both("resume", "续训").into(),
            text: text!(
                "{} does not tell its base weights and data: an earlier version saved it, they are not compared",
                "{} 没有记录基座权重和数据：它由较早的版本保存，因此不作比较",
                directory.display()
            ),
        }),
    }
    if broken.is_empty() {
        return Ok(accepted);
    }
    if !config.resume_anyway {
        let failure = Failure::new(
            ErrorCode::Resume,
            text!(
                "cannot {}: it would train on something else",
                "无法{}：训练的内容会不同",
                doing(directory)
            ),
            both(
                "adapters and optimizer states belong to the base weights and the data that they were trained on",
                "适配器和优化器状态属于训练它们时的基座权重和数据",
            ),
        );
        return Err(failure
            .evidence_lines(broken)
            .next(both(
                "give the same --model, --data and --quantize as before",
                "请给出与之前相同的 --model、--data 和 --quantize",
            ))
            .next(text!(
                "{ANYWAY}   (continues with what is given now)",
                "{ANYWAY}   (按现在给定的内容继续)"
            )));
    }
    for text in &broken {
        show(Event::Warning {
            text: text!("{ANYWAY}: {text}", "{ANYWAY}：{text}"),
        });
    }
    accepted.extend(broken.iter().map(|text| text.get(Lang::En).to_owned()));
    Ok(accepted)
}

fn other_origin(saved: &Origin, now: &Origin) -> Vec<Text> {
    let brief = |hash: &str| hash.get(..12).unwrap_or(hash).to_owned();
    let compared = [
        (
            both("the frozen base weights differ", "冻结的基座权重不同"),
            &saved.base,
            &now.base,
        ),
        (
            both(
                "the samples, their order or their images differ",
                "样本、样本的顺序或图片不同",
            ),
            &saved.data,
            &now.data,
        ),
    ];
    let differ = compared.iter().filter(|(_, saved, now)| saved != now);
    differ
        .map(|(what, saved, now)| {
            text!(
                "{what}: saved with {}, now {}",
                "{what}：保存时为 {}，现在为 {}",
                brief(saved),
                brief(now)
            )
        })
        .collect()
}

/// Texts about settings and files that differ without a break. The rank of adapters is their shape, so it must be equal.
fn other_settings(
    config: &RunConfig,
    directory: &Path,
    saved: &Origin,
    now: &Origin,
) -> Result<Vec<Text>, Failure> {
    let mut texts = Vec::new();
    for (name, before) in &saved.settings {
        let Some(after) = now.settings.get(name).filter(|after| *after != before) else {
            continue;
        };
        if name == "--lora-rank" {
            return Err(Failure::new(
                ErrorCode::Resume,
                text!(
                    "cannot {}: its adapters have another rank",
                    "无法{}：它的适配器是另一种 rank",
                    doing(directory)
                ),
                both(
                    "the rank is the shape of the adapters, so their state cannot continue",
                    "rank 决定适配器的形状，因此它们的状态无法继续",
                ),
            )
            .evidence(text!(
                "saved with {name} {before}, now {after}",
                "保存时为 {name} {before}，现在为 {after}"
            ))
            .next(Text::literal(format_args!("{name} {before}"))));
        }
        texts.push(match name.starts_with("--") {
            true => text!(
                "{name} was {before} in the checkpoint's run and is {after} now",
                "{name} 在检查点的运行中为 {before}，现在为 {after}"
            ),
            false => text!(
                "{} differs from the one that the checkpoint's run used",
                "{} 与检查点的运行所用的文件不同",
                config.model_dir().join(name).display()
            ),
        });
    }
    Ok(texts)
}

/// What changes the order of the data, as (saved, now); `None` if nothing does.
fn other_order(config: &RunConfig, meta: &Value, samples: usize) -> Option<[Text; 2]> {
    let number = |key: &str| meta.get(key).and_then(Value::as_u64);
    let saved = (number("samples")?, number("global_batch")?, number("seed")?);
    let now = (samples as u64, config.global_batch() as u64, config.seed);
    let text = |what: Both, (samples, batch, seed): (u64, u64, u64)| {
        text!(
            "{what} {samples} samples, a global batch of {batch} and --seed {seed}",
            "{what} {samples} 个样本、全局批大小 {batch}、--seed {seed}"
        )
    };
    (saved != now).then(|| {
        [
            text(both("saved with", "保存时为"), saved),
            text(both("now", "现在为"), now),
        ]
    })
}

/// Refuses a run whose first `done` steps do not take the samples that those of the checkpoint took, since it has another
/// budget of tokens or other lengths of samples.
fn same_budget(
    config: &RunConfig,
    directory: &Path,
    meta: &Value,
    sampler: &Sampler,
    done: u64,
) -> Result<(), Failure> {
    let now = config.batch.tokens_per_batch.map(|most| most as u64);
    let saved = meta.get(TOKENS_PER_BATCH).and_then(Value::as_u64);
    let used = meta.get(SAMPLES_USED).and_then(Value::as_u64);
    let same = saved == now && used.is_none_or(|used| used == sampler.used(done));
    if same || config.resume_anyway {
        return Ok(());
    }
    let text = |most: Option<u64>, used: u64| {
        let most = most.map_or_else(|| "-".to_owned(), |most| most.to_string());
        text!(
            "--tokens-per-batch {most}, {used} samples in {done} steps",
            "--tokens-per-batch {most}，{done} 步共 {used} 个样本"
        )
    };
    let before = text(saved, used.unwrap_or(done * sampler.global_batch()));
    let after = text(now, sampler.used(done));
    Err(Failure::new(
        ErrorCode::Resume,
        text!(
            "cannot {}: the order of the data would change",
            "无法{}：数据的顺序会改变",
            doing(directory)
        ),
        both(
            "the position in the data depends on --tokens-per-batch and on the lengths of the samples",
            "数据中的位置取决于 --tokens-per-batch 和样本的长度",
        ),
    )
    .evidence(text!("saved with {before}", "保存时为 {before}"))
    .evidence(text!("now {after}", "现在为 {after}"))
    .next(match saved {
        Some(saved) => Text::literal(format_args!("--tokens-per-batch {saved}")),
        None => both("omit --tokens-per-batch", "请去掉 --tokens-per-batch").into(),
    })
    .next(text!(
        "{ANYWAY}   (continues with the order of what is given now)",
        "{ANYWAY}   (按现在给定的顺序继续)"
    )))
}

/// Reads the loop's position. Refuses a change in the order of the data, and a run without steps left.
pub(crate) fn position(
    config: &RunConfig,
    directory: &Path,
    meta: &Value,
    sampler: &Sampler,
    total_steps: u64,
) -> Result<Position, Failure> {
    let samples = sampler.per_epoch() as usize;
    let number = |key: &str| meta.get(key).and_then(Value::as_u64);
    let state = [
        "steps_done",
        "total_tokens",
        "samples",
        "global_batch",
        "seed",
    ]
    .map(number);
    let [Some(done), Some(total_tokens), Some(_), Some(_), Some(_)] = state else {
        return Err(Failure::new(
            ErrorCode::Resume,
            text!("cannot {}", "无法{}", doing(directory)),
            both(
                "its manifest lacks the state of the training loop",
                "它的清单缺少训练循环的状态",
            ),
        )
        .next(both(
            "give a checkpoint-N directory that this program saved",
            "请指定由本程序保存的 checkpoint-N 目录",
        )));
    };
    let order = other_order(config, meta, samples).filter(|_| !config.resume_anyway);
    if let Some(differences) = order {
        return Err(Failure::new(
            ErrorCode::Resume,
            text!(
                "cannot {}: the order of the data would change",
                "无法{}：数据的顺序会改变",
                doing(directory)
            ),
            both(
                "the position in the data depends on the samples, the global batch and the seed",
                "数据中的位置取决于样本、全局批大小和种子",
            ),
        )
        .evidence_lines(differences)
        .next(both(
            "use the same data, the same seed and the same ranks x micro-batch x accumulation",
            "请使用相同的数据、相同的种子，以及相同的 rank 数 x 微批 x 累积步数",
        ))
        .next(text!(
            "{ANYWAY}   (continues with the order of what is given now)",
            "{ANYWAY}   (按现在给定的顺序继续)"
        )));
    }
    same_budget(config, directory, meta, sampler, done)?;
    let worst_first = config.batch.worst_first;
    let saved_worst_first = meta.get("worst_first").and_then(Value::as_bool);
    if let Some(saved) = saved_worst_first.filter(|saved| *saved != worst_first) {
        return Err(Failure::new(
            ErrorCode::Resume,
            text!(
                "cannot {}: the order of the data would change",
                "无法{}：数据的顺序会改变",
                doing(directory)
            ),
            both(
                "--longest-first changes the order of the first epoch",
                "--longest-first 会改变第一个 epoch 的顺序",
            ),
        )
        .evidence(text!(
            "saved with --longest-first {saved}, now {worst_first}",
            "保存时为 --longest-first {saved}，现在为 {worst_first}"
        ))
        .next(Text::literal(format_args!("--longest-first {saved}"))));
    }
    if done >= total_steps {
        return Err(Failure::new(
            ErrorCode::NothingToDo,
            text!(
                "{} has already completed all {total_steps} steps",
                "{} 已经完成全部 {total_steps} 步",
                directory.display()
            ),
            both("no step is left to train", "没有剩余的步需要训练"),
        )
        .evidence(text!(
            "{done} of {total_steps} steps are done: {:.2} passes over {samples} samples",
            "{total_steps} 步中已完成 {done} 步：在 {samples} 个样本上训练了 {:.2} 遍",
            sampler.epochs_after(done)
        ))
        .next(both(
            "raise --max-steps or --num-train-epochs",
            "请提高 --max-steps 或 --num-train-epochs",
        )));
    }
    Ok(Position {
        done,
        total_tokens,
        exact_match_before: meta.get("exact_match_before").and_then(Value::as_f64),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::resolve;
    use crate::rank_env::Env;

    #[test]
    fn absent_flags_take_what_the_checkpoint_trained() {
        let site = tempfile::tempdir().expect("temp dir");
        let path = |name: &str| site.path().join(name);
        std::fs::create_dir(path("run")).expect("a directory");
        std::fs::write(path("config.json"), "{\"model_type\": \"minicpmv\"}").expect("written");
        let config = |change: &dyn Fn(&mut Args)| {
            let mut args = Args {
                model: Some(site.path().to_owned()),
                data: Some("d".into()),
                resume: Some(path("run/checkpoint-1").display().to_string()),
                ..Args::default()
            };
            change(&mut args);
            let env = Env::from_lookup(&|_| None).expect("reads");
            (resolve(&args, &env).expect("resolves").config, args)
        };
        let (mut saved, _) = config(&|args| {
            (args.lora_rank, args.lora_alpha) = (Some(8), Some(64.0));
            (args.tune_vision, args.learning_rate) = (Some(true), Some(1e-6));
        });
        // As a version wrote it that left the modules to the family.
        if let Some(lora) = &mut saved.trainable.lora {
            lora.modules_to_save = None;
        }
        saved
            .draft()
            .save_to(&path("run").join(CONFIG_FILE))
            .expect("saved");
        let continue_with = |change: &dyn Fn(&mut Args)| {
            let (config, args) = config(change);
            continued(config, &args)
        };
        let config = continue_with(&|_| ());
        assert_eq!(config.optimizer.learning_rate, 1e-6);
        assert!(config.trainable.tune_vision && !config.trainable.tune_llm);
        let lora = config.trainable.lora.expect("adapters");
        assert_eq!((lora.lora_rank, lora.lora_alpha), (8, 64.0));
        let modules = lora.modules_to_save.expect("modules").join(" ");
        assert_eq!(modules, "embed_tokens resampler vpm");
        let config = continue_with(&|args| {
            args.lora_alpha = Some(3.0);
            args.tune_vision = Some(false);
        });
        assert!(!config.trainable.tune_vision);
        let lora = config.trainable.lora.expect("adapters");
        assert_eq!((lora.lora_rank, lora.lora_alpha), (8, 3.0));
        assert!(
            continue_with(&|args| args.use_lora = Some(false))
                .trainable
                .lora
                .is_none()
        );
    }
}
