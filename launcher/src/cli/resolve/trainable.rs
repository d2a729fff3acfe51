//! Which parts train: flags to the resolved choice.

use crate::lang::{both, text};
use std::ops::Range;
use std::path::PathBuf;

use super::{note, out_of_range, positive, within};
use crate::cli::{Args, Note};
use crate::config::words::words;
use crate::config::{Lora, Trainable, defaults};
use crate::error::{Failure, failures};
use models::adapter::{ADAPTER_CONFIG, AdapterConfig};
use models::selection::VISION;

/// Resolves the flags under "What is trained".
pub(super) fn resolve(args: &Args, notes: &mut Vec<Note>) -> Result<Trainable, Failure> {
    let prefixes = args.ptuning_tokens.unwrap_or(0);
    let lora = lora(args, notes)?;
    // Adapters and prefixes train alone, unless other parts are named.
    let whole = lora.is_none() && prefixes == 0;
    let train = args.train.clone().filter(|parts| parts != "none");
    if whole && args.train.is_some() && train.is_none() {
        return Err(out_of_range(
            "--train none",
            both(
                "needs adapters (--lora-rank 8) or --ptuning-tokens: nothing else would train",
                "需要适配器（--lora-rank 8）或 --ptuning-tokens：否则没有可训练的部分",
            ),
        ));
    }
    let switches = [
        ("--tune-vision", args.tune_vision),
        ("--tune-llm", args.tune_llm),
    ];
    let freeze = args.freeze.clone().filter(|parts| parts != "none");
    for (flag, given) in switches {
        let reason = match given {
            Some(_) if train.is_some() => {
                both("--train selects the parts", "训练的部分由 --train 选择")
            }
            Some(true) if freeze.is_some() => both(
                "the parts that --freeze names stay frozen; --freeze none trains them",
                "--freeze 指定的部分保持冻结；--freeze none 会训练它们",
            ),
            _ => continue,
        };
        notes.push(note(flag, reason));
    }
    Ok(Trainable {
        tune_vision: args.tune_vision.unwrap_or(whole),
        tune_llm: args.tune_llm.unwrap_or(whole),
        train,
        freeze,
        learning_rates: learning_rates(args.lr.as_deref().unwrap_or_default())?,
        lora,
        ptuning_tokens: prefixes,
    })
}

/// Flags that ask for adapters, and whether each is given.
/// Largest `--lora-rank`: more than the width of any model.
const MAX_RANK: usize = 1 << 20;

fn lora_flags(args: &Args) -> [(&'static str, bool); 10] {
    [
        ("--adapter", args.adapter.is_some()),
        ("--lora-rank", args.lora_rank.is_some()),
        ("--lora-alpha", args.lora_alpha.is_some()),
        ("--lora-dropout", args.lora_dropout.is_some()),
        ("--lora-target-modules", args.lora_target_modules.is_some()),
        ("--lora-layers", args.lora_layers.is_some()),
        (
            "--lora-per-projection",
            args.lora_per_projection == Some(true),
        ),
        ("--modules-to-save", args.modules_to_save.is_some()),
        ("--use-rslora", args.use_rslora == Some(true)),
        ("--loraplus-lr-ratio", args.loraplus_lr_ratio.is_some()),
    ]
}

/// Whether the run trains adapters. A flag of adapters asks for them; only an explicit `false` says otherwise.
pub(super) fn has_adapters(args: &Args) -> bool {
    let implied = || lora_flags(args).iter().any(|(_, given)| *given);
    args.use_lora.unwrap_or_else(implied)
}

/// Adapters that training starts from: their directory and settings. Flags that these settings replace are noted.
fn started(
    args: &Args,
    notes: &mut Vec<Note>,
) -> Result<Option<(PathBuf, AdapterConfig)>, Failure> {
    let Some(named) = &args.adapter else {
        return Ok(None);
    };
    let latest = || engine::checkpoint::find_latest(named).ok().flatten();
    let dir = match named.join(ADAPTER_CONFIG).is_file() {
        true => named.clone(),
        false => latest().unwrap_or_else(|| named.clone()),
    };
    let settings = AdapterConfig::open(&dir).map_err(|error| {
        failures::adapter(
            text!(
                "cannot start from the adapters in {}",
                "无法从 {} 中的适配器开始",
                named.display()
            ),
            &error,
            both(
                "give --adapter a directory with adapter_config.json and adapter_model.safetensors",
                "请把含有 adapter_config.json 和 adapter_model.safetensors 的目录交给 --adapter",
            ),
        )
    })?;
    let replaced = [
        (
            "--lora-rank",
            args.lora_rank.is_some_and(|rank| rank != settings.r),
        ),
        (
            "--lora-alpha",
            args.lora_alpha
                .is_some_and(|alpha| alpha != settings.lora_alpha),
        ),
        ("--lora-target-modules", args.lora_target_modules.is_some()),
        ("--lora-layers", args.lora_layers.is_some()),
        (
            "--lora-per-projection",
            args.lora_per_projection == Some(true),
        ),
        (
            "--use-rslora",
            args.use_rslora
                .is_some_and(|asked| asked != settings.use_rslora()),
        ),
    ];
    let replaced = replaced.iter().filter(|(_, replaced)| *replaced);
    notes.extend(replaced.map(|(flag, _)| {
        note(
            flag,
            both(
                "the adapters of --adapter decide it",
                "由 --adapter 的适配器决定",
            ),
        )
    }));
    Ok(Some((dir, settings)))
}

fn lora(args: &Args, notes: &mut Vec<Note>) -> Result<Option<Lora>, Failure> {
    let meant = has_adapters(args);
    if let Some(ratio) = args.loraplus_lr_ratio {
        positive("--loraplus-lr-ratio", ratio)?;
    }
    if let (true, Some((dir, settings))) = (meant, started(args, notes)?) {
        let lora_dropout = args.lora_dropout.unwrap_or(settings.lora_dropout);
        within("--lora-dropout", lora_dropout, 0.0, 1.0 - f64::EPSILON)?;
        return Ok(Some(Lora {
            lora_rank: settings.r,
            lora_alpha: settings.lora_alpha,
            use_rslora: settings.use_rslora(),
            loraplus_lr_ratio: args.loraplus_lr_ratio,
            lora_dropout,
            target_modules: None,
            per_projection: false,
            layers: None,
            modules_to_save: match args.modules_to_save {
                Some(_) => Some(modules_to_save(args, notes)),
                None => Some(settings.modules_to_save.unwrap_or_default()),
            },
            adapter: Some(dir),
        }));
    }
    if !meant {
        let given = lora_flags(args).into_iter().filter(|(_, given)| *given);
        notes.extend(
            given.map(|(flag, _)| note(flag, both("--use-lora is false", "--use-lora 为 false"))),
        );
    }
    let lora_rank = args.lora_rank.unwrap_or(defaults::LORA_RANK);
    let doubled = defaults::LORA_SCALE * lora_rank as f64;
    let lora_alpha = args.lora_alpha.unwrap_or(doubled);
    if !(1..=MAX_RANK).contains(&lora_rank) {
        return Err(out_of_range(
            &format!("--lora-rank {lora_rank}"),
            text!("must be 1 to {MAX_RANK}", "必须为 1 到 {MAX_RANK}"),
        ));
    }
    positive("--lora-alpha", lora_alpha)?;
    let lora_dropout = args.lora_dropout.unwrap_or(0.0);
    within("--lora-dropout", lora_dropout, 0.0, 1.0 - f64::EPSILON)?;
    let layers = args.lora_layers.as_deref().map(layers).transpose()?;
    let target_modules = args.lora_target_modules.as_deref();
    Ok(meant.then(|| Lora {
        lora_rank,
        lora_alpha,
        use_rslora: args.use_rslora.unwrap_or(false),
        loraplus_lr_ratio: args.loraplus_lr_ratio,
        lora_dropout,
        target_modules: target_modules.map(str::to_owned),
        per_projection: args.lora_per_projection.unwrap_or(false),
        layers,
        modules_to_save: Some(modules_to_save(args, notes)),
        adapter: None,
    }))
}

/// Modules named by the flag. An explicit `--tune-vision false` keeps a vision tower out that a recipe names.
fn modules_to_save(args: &Args, notes: &mut Vec<Note>) -> Vec<String> {
    let given = args.modules_to_save.as_deref();
    let named = given.filter(|names| *names != "none").unwrap_or_default();
    let mut modules = words(named);
    if args.tune_vision == Some(false) {
        let before = modules.len();
        modules.retain(|module| !VISION.contains(&&**module));
        if modules.len() < before {
            let flag = format!("--modules-to-save {named} for the vision tower");
            notes.push(note(
                &flag,
                both(
                    "--tune-vision false freezes it",
                    "--tune-vision false 冻结了它",
                ),
            ));
        }
    }
    modules
}

fn layers(text: &str) -> Result<Range<usize>, Failure> {
    let numbers = text.split_once("..").and_then(|(from, to)| {
        let number = |word: &str, absent| match word.trim() {
            "" => Some(absent),
            word => word.parse().ok(),
        };
        Some(number(from, 0)?..number(to, usize::MAX)?)
    });
    let range = numbers.filter(|range| range.start < range.end);
    range.ok_or_else(|| {
        out_of_range(
            &format!("--lora-layers {text}"),
            both(
                "must be a half-open range such as 0..16, 8.. or ..4",
                "必须是半开区间，例如 0..16、8.. 或 ..4",
            ),
        )
    })
}

fn learning_rates(text: &str) -> Result<Vec<(String, f64)>, Failure> {
    let items = text
        .split(',')
        .map(str::trim)
        .filter(|item| !item.is_empty());
    let rate = |item: &str| {
        let (part, rate) = item
            .rsplit_once('=')
            .and_then(|(part, rate)| Some((part, rate.parse().ok()?)))?;
        (f64::is_finite(rate) && rate >= 0.0 && !part.is_empty()).then(|| (part.to_owned(), rate))
    };
    items
        .map(|item| {
            rate(item).ok_or_else(|| {
                out_of_range(
                    &format!("--lr {item}"),
                    both(
                        "must be a part and a rate of at least 0, such as resampler=1e-5",
                        "必须是某个部分和不小于 0 的学习率，例如 resampler=1e-5",
                    ),
                )
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use models::Family;

    fn resolved(change: impl FnOnce(&mut Args)) -> (Result<Trainable, Failure>, Vec<Note>) {
        let (mut args, mut notes) = (Args::default(), Vec::new());
        change(&mut args);
        (resolve(&args, &mut notes), notes)
    }

    #[test]
    fn adapters_train_alone_unless_parts_are_named() {
        let modules = |change: &dyn Fn(&mut Args)| {
            let (trainable, _) = resolved(|args| {
                args.use_lora = Some(true);
                change(args);
            });
            let trainable = trainable.expect("resolves");
            let lora = trainable.lora.expect("adapters");
            let modules = lora.modules_to_save(Family::MiniCpm, trainable.tune_vision);
            (modules.join(" "), trainable.tune_vision)
        };
        assert_eq!(modules(&|_| ()), (String::new(), false));
        assert_eq!(
            modules(&|a| a.modules_to_save = Some("lm_head, vpm".into())),
            ("lm_head vpm".to_owned(), false)
        );
        assert_eq!(
            modules(&|a| {
                a.modules_to_save = Some("resampler,vpm".into());
                a.tune_vision = Some(false);
            }),
            ("resampler".to_owned(), false)
        );
        assert_eq!(
            modules(&|a| a.tune_vision = Some(true)),
            (String::new(), true)
        );
        // Files of earlier versions have none: the modules of the published script.
        let earlier = Lora {
            modules_to_save: None,
            ..resolved(|a| a.use_lora = Some(true))
                .0
                .expect("resolves")
                .lora
                .expect("adapters")
        };
        assert_eq!(
            earlier.modules_to_save(Family::MiniCpm, false).join(" "),
            "embed_tokens resampler"
        );
    }

    #[test]
    fn alpha_is_twice_the_rank_unless_it_is_given() {
        let alpha = |rank, alpha| {
            let (trainable, _) = resolved(|args| (args.lora_rank, args.lora_alpha) = (rank, alpha));
            trainable
                .expect("resolves")
                .lora
                .map(|lora| lora.lora_alpha)
        };
        assert_eq!(alpha(Some(8), None), Some(16.0));
        assert_eq!(alpha(Some(8), Some(1.0)), Some(1.0));
        assert_eq!(alpha(None, Some(1.0)), Some(1.0));
        assert_eq!(alpha(None, None), None);
    }

    #[test]
    fn adapters_and_a_language_model_that_trains_go_together() {
        let (both, _) = resolved(|args| (args.use_lora, args.tune_llm) = (Some(true), Some(true)));
        let both = both.expect("resolves");
        assert!(both.tune_llm && both.lora.is_some());
        let (adapters, _) = resolved(|args| args.lora_layers = Some("2..4".into()));
        let adapters = adapters.expect("resolves");
        assert!(!adapters.tune_llm);
        assert_eq!(adapters.lora.expect("adapters").layers, Some(2..4));
    }

    #[test]
    fn named_parts_override_the_switches_and_say_so() {
        let (trainable, notes) = resolved(|args| {
            args.train = Some("lm_head".into());
            args.tune_vision = Some(true);
        });
        assert_eq!(
            trainable.expect("resolves").train.as_deref(),
            Some("lm_head")
        );
        assert_eq!(notes[0].flag, "--tune-vision");
    }

    #[test]
    fn a_part_that_is_switched_on_and_frozen_is_named() {
        let notes = |freeze: &str| {
            let change = |args: &mut Args| {
                args.tune_vision = Some(true);
                args.freeze = Some(freeze.into());
            };
            resolved(change).1
        };
        assert_eq!(notes("none"), []);
        assert_eq!(notes("vision")[0].flag, "--tune-vision");
    }

    #[test]
    fn rates_and_layers_out_of_form_are_refused() {
        let (rates, _) = resolved(|args| args.lr = Some("resampler=1e-5, vpm=0".into()));
        let rates = rates.expect("resolves").learning_rates;
        assert_eq!(
            rates,
            [("resampler".to_owned(), 1e-5), ("vpm".to_owned(), 0.0)]
        );
        for bad in ["resampler", "resampler=", "=1", "a=-1", "a=nan"] {
            assert!(
                resolved(|args| args.lr = Some(bad.into())).0.is_err(),
                "{bad}"
            );
        }
        for bad in ["3", "4..4", "a..b", "5..2"] {
            assert!(
                resolved(|args| args.lora_layers = Some(bad.into()))
                    .0
                    .is_err(),
                "{bad}"
            );
        }
    }
}
