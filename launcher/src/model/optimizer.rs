//! The optimizer of a run, its parameter groups, and the table of trainable parts.

use super::setup;
use crate::config::RunConfig;
use crate::error::parts::{base_name, part};
use crate::error::{Failure, chain, failures};
use crate::lang::both;
use crate::ui::{Event, TrainRow};
use engine::{OptimizerConfig, ParamSpec};
use models::VisionLanguageModel;
use models::selection::Selection;
use optim::AdamW;
use optim::ParameterGroups;
use optim::Schedule;
use std::sync::Arc;

/// Trainable parts of the model, in the order of the forward pass.
pub(crate) fn trained_parts(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
) -> Result<Vec<TrainRow>, Failure> {
    let rates = Rates::new(config)?;
    let mut rows: Vec<TrainRow> = Vec::new();
    for param in model.spec().params.iter().filter(|param| param.trainable) {
        let name = base_name(&param.name);
        let lr = rates.of(param) * config.lr_factor();
        let adapter = if name.len() < param.name.len() {
            " (adapters)"
        } else {
            ""
        };
        let module = format!("{}{adapter}", part(name));
        let elems = param.shape.elems() as u64;
        match rows
            .iter_mut()
            .find(|row| row.module == module && row.lr == lr)
        {
            Some(row) => (row.tensors, row.params) = (row.tensors + 1, row.params + elems),
            None => rows.push(TrainRow {
                module,
                tensors: 1,
                params: elems,
                dtype: setup::precision(config).weight_dtype().to_string(),
                lr,
            }),
        }
    }
    Ok(rows)
}

/// Notes about learning rates of parts of which nothing trains.
pub(crate) fn unused_rates(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
) -> Result<Vec<Event>, Failure> {
    let params = &model.spec().params;
    let trained = params.iter().filter(|param| param.trainable);
    let trained: Vec<&str> = trained.map(|param| base_name(&param.name)).collect();
    let parts = learning_rates(config)?.into_iter();
    let unused = parts.filter(|(_, part, _)| !trained.iter().any(|name| part.contains(name)));
    let note = |(part, _, rate): (&str, Selection, f64)| Event::Note {
        flag: format!("--lr {part}={rate:e}"),
        reason: both(
            "nothing of this part trains, so the rate has no effect",
            "该部分没有可训练的参数，此学习率不起作用",
        )
        .into(),
    };
    Ok(unused.map(note).collect())
}

/// Learning rates of single parameters.
struct Rates<'c> {
    parts: Vec<(&'c str, Selection, f64)>,
    learning_rate: f64,
    /// LoRA+: factor of B and of vectors.
    ratio: f64,
}

impl<'c> Rates<'c> {
    fn new(config: &'c RunConfig) -> Result<Self, Failure> {
        let lora = config.trainable.lora.as_ref();
        Ok(Self {
            parts: learning_rates(config)?,
            learning_rate: config.optimizer.learning_rate,
            ratio: lora.and_then(|lora| lora.loraplus_lr_ratio).unwrap_or(1.0),
        })
    }

    /// Peak learning rate of `param` before the factor of the batch size.
    fn of(&self, param: &ParamSpec) -> f64 {
        let name = base_name(&param.name);
        let own = self.parts.iter().find(|(_, part, _)| part.contains(name));
        let rate = own.map_or(self.learning_rate, |(.., rate)| *rate);
        // The rule of the authors, which peft, LLaMA-Factory and ms-swift share.
        match param.name.ends_with(".lora_B.weight") || param.shape.rank() == 1 {
            true => rate * self.ratio,
            false => rate,
        }
    }
}

/// Learning rates of parts: text of the selection, the selection, and the rate.
pub(crate) fn learning_rates(config: &RunConfig) -> Result<Vec<(&str, Selection, f64)>, Failure> {
    let rates = config.trainable.learning_rates.iter();
    let parsed = rates.map(|(part, rate)| {
        let selection = Selection::parse(part).map_err(|e| failures::selection("--lr", &e))?;
        Ok((&**part, selection, *rate))
    });
    parsed.collect()
}

/// AdamW with the settings of the run.
pub(crate) fn rule(config: &RunConfig) -> AdamW {
    let settings = &config.optimizer;
    AdamW {
        beta1: settings.adam_beta1,
        beta2: settings.adam_beta2,
        eps: settings.adam_epsilon,
        pure_bf16: config.numbers.pure_bf16,
        eight_bit: config.numbers.eight_bit,
    }
}

pub(crate) fn optimizer(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
) -> Result<OptimizerConfig, Failure> {
    let settings = &config.optimizer;
    let groups = ParameterGroups::new(settings.weight_decay as f32, &[]).map_err(|e| {
        Failure::usage(
            both("parameter groups cannot be formed", "无法构成参数组"),
            chain(&e),
        )
    })?;
    let rates = Rates::new(config)?;
    for (_, selection, _) in &rates.parts {
        let names = model.spec().params.iter().map(|p| base_name(&p.name));
        selection
            .check(names)
            .map_err(|e| failures::selection("--lr", &e))?;
    }
    let spared = settings.no_decay.as_deref().map(Selection::parse);
    let spared = spared
        .transpose()
        .and_then(|spared| match &spared {
            Some(selection) => {
                let names = model.spec().params.iter().map(|p| base_name(&p.name));
                selection.check(names).map(|()| spared)
            }
            None => Ok(spared),
        })
        .map_err(|e| failures::selection("--no-decay", &e))?;
    let options = |param: &ParamSpec| {
        let name = &*param.name;
        let mut options = groups.options(name, optim::groups::is_norm_name(name));
        if let Some(spared) = &spared {
            let decays = !spared.contains(base_name(name));
            options.weight_decay = if decays {
                settings.weight_decay as f32
            } else {
                0.0
            };
        }
        let rate = rates.of(param);
        if rate != settings.learning_rate {
            options.lr_scale = (rate / settings.learning_rate) as f32;
        }
        options
    };
    let groups = model.spec().params.iter().map(options).collect();
    Ok(OptimizerConfig {
        rule: Arc::new(rule(config)),
        groups,
    })
}

/// Learning-rate schedule that `config` asks for, over `total_steps` steps unless its settings give their own number.
pub(crate) fn schedule(config: &RunConfig, total_steps: u64) -> Schedule {
    let settings = &config.optimizer;
    let kwargs = settings.scheduler_kwargs;
    Schedule {
        kind: kwargs.kind(settings.scheduler),
        warmup_steps: settings.warmup.steps(total_steps),
        total_steps: kwargs.total_num_steps.unwrap_or(total_steps),
        base_lr: config.peak_lr(),
    }
}
