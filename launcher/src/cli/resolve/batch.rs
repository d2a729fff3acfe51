//! Batch sizes: two of micro-batch, accumulation and global batch give the third.

use super::{note, out_of_range};
use crate::cli::{Args, Note};
use crate::config::defaults::{self, Defaults};
use crate::config::{BatchConfig, Recompute};
use crate::error::Failure;
use crate::lang::{Text, both, text};
use crate::rank_env::Env;
use std::num::NonZeroUsize;

/// Resolves the flags of batches.
pub(super) fn resolve(
    args: &Args,
    env: &Env,
    defaults: &Defaults,
    world_size: usize,
    notes: &mut Vec<Note>,
) -> Result<BatchConfig, Failure> {
    let given = [
        (
            "--per-device-train-batch-size",
            args.per_device_train_batch_size,
        ),
        (
            "--gradient-accumulation-steps",
            args.gradient_accumulation_steps,
        ),
        ("--global-batch-size", args.global_batch),
        ("--tokens-per-batch", args.tokens_per_batch),
        (
            "--per-device-eval-batch-size",
            args.per_device_eval_batch_size,
        ),
        ("--model-max-length", args.model_max_length),
        ("--max-slice-nums", args.max_slice_nums),
        ("--image-max-pixels", args.image_max_pixels),
        ("--limit", args.limit),
    ];
    if let Some((flag, _)) = given.iter().find(|(_, value)| *value == Some(0)) {
        return Err(out_of_range(
            &format!("{flag} 0"),
            both("must be at least 1", "必须至少为 1"),
        ));
    }
    // Products of these fit in 64 bits with any number of ranks.
    let most = |flag: &str| match flag {
        "--global-batch-size" => 1 << 40,
        "--tokens-per-batch" => 1 << 24,
        _ => 1 << 20,
    };
    let all = given.iter().take(5);
    let mut large = all.filter(|(flag, value)| value.is_some_and(|value| value > most(flag)));
    if let Some((flag, Some(value))) = large.next() {
        return Err(out_of_range(
            &format!("{flag} {value}"),
            text!("must be at most {}", "必须不大于 {}", most(flag)),
        ));
    }
    let find_batch = args.find_batch.unwrap_or(false);
    if find_batch && args.per_device_train_batch_size.is_some() {
        return Err(Failure::usage(
            both(
                "--find-batch and --per-device-train-batch-size contradict each other",
                "--find-batch 与 --per-device-train-batch-size 互相矛盾",
            ),
            both(
                "--find-batch searches for the value of the other flag",
                "--find-batch 搜索的正是另一个参数的值",
            ),
        )
        .next(both(
            "keep one of them; --global-batch-size limits the result of the search",
            "请只保留其中一个；--global-batch-size 可限制搜索的结果",
        )));
    }
    if args.tokens_per_batch.is_some() {
        only_budget(args, notes)?;
    }
    for (name, flag) in [
        ("MAX_PIXELS", args.image_max_pixels),
        ("MIN_PIXELS", args.image_min_pixels),
        ("MAX_SLICE_NUMS", args.max_slice_nums),
    ] {
        if flag.is_none() {
            super::usable(env, name)?;
        }
    }
    let image_max_pixels = args.image_max_pixels.or(env.max_pixels);
    let image_min_pixels = args.image_min_pixels.or(env.min_pixels);
    if let (Some(most), Some(least)) = (image_max_pixels, image_min_pixels)
        && least > most
    {
        return Err(out_of_range(
            &format!("--image-min-pixels {least}"),
            text!(
                "must be at most --image-max-pixels, which is {most}",
                "必须不大于 --image-max-pixels，即 {most}"
            ),
        ));
    }
    let (micro_batch, accumulation_steps) = sizes(args, defaults, world_size)?;
    Ok(BatchConfig {
        micro_batch,
        accumulation_steps,
        eval_batch: args
            .per_device_eval_batch_size
            .unwrap_or(defaults.eval_batch),
        model_max_length: args.model_max_length.unwrap_or(defaults.model_max_length),
        max_slice_nums: args
            .max_slice_nums
            .or(env.max_slice_nums)
            .unwrap_or(defaults::MAX_SLICE_NUMS),
        image_max_pixels,
        image_min_pixels,
        skip_bad_samples: args.skip_bad_samples.unwrap_or(false),
        limit: args.limit,
        data_workers: args.data_workers.unwrap_or_default(),
        worst_first: args.worst_first.unwrap_or(defaults.worst_first),
        global_batch: args.global_batch,
        find_batch,
        tokens_per_batch: args.tokens_per_batch,
    })
}

/// Refuses what contradicts a budget of tokens. A size in samples has no effect.
fn only_budget(args: &Args, notes: &mut Vec<Note>) -> Result<(), Failure> {
    let refused = [
        ("--find-batch", args.find_batch == Some(true)),
        ("--global-batch-size", args.global_batch.is_some()),
    ];
    if let Some((flag, _)) = refused.iter().find(|(_, given)| *given) {
        return Err(Failure::usage(
            text!(
                "{flag} and --tokens-per-batch contradict each other",
                "{flag} 与 --tokens-per-batch 互相矛盾"
            ),
            both(
                "a budget of tokens decides how many samples a micro-batch has",
                "微批的样本数由 token 预算决定",
            ),
        )
        .next(both(
            "keep one of them; --gradient-accumulation-steps enlarges an update",
            "请只保留其中一个；--gradient-accumulation-steps 可增大每次更新",
        )));
    }
    if args.per_device_train_batch_size.is_some() {
        notes.push(note(
            "--per-device-train-batch-size",
            both(
                "--tokens-per-batch fills the micro-batches",
                "微批由 --tokens-per-batch 填充",
            ),
        ));
    }
    Ok(())
}

/// Micro-batch and accumulation.
fn sizes(args: &Args, defaults: &Defaults, world_size: usize) -> Result<(usize, usize), Failure> {
    let (micro, accumulation) = (
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
    );
    if args.tokens_per_batch.is_some() {
        return Ok((1, accumulation.unwrap_or(1)));
    }
    let Some(global) = args.global_batch else {
        let accumulation = accumulation.unwrap_or(1);
        // The demo keeps its global batch at any number of ranks.
        let default = defaults
            .global_batch
            .map_or(defaults.micro_batch, |global| {
                global.div_ceil(world_size * accumulation).max(1)
            });
        return Ok((micro.unwrap_or(default), accumulation));
    };
    match (micro, accumulation) {
        (Some(micro), Some(accumulation)) if micro * accumulation * world_size == global => {
            Ok((micro, accumulation))
        }
        (Some(micro), Some(accumulation)) => Err(Failure::usage(
            both("the batch sizes contradict each other", "各批大小互相矛盾"),
            text!("{micro} per rank x {accumulation} accumulated x {world_size} ranks = {}, not --global-batch-size {global}", "每个 rank {micro} x 累积 {accumulation} 次 x {world_size} 个 rank = {}，而不是 --global-batch-size {global}",
                micro * accumulation * world_size
            ),
        )
        .next(both("give two of the three; the third is computed", "请给出三者中的两个；第三个由程序计算"))),
        (None, Some(accumulation)) => Ok((
            divided(global, accumulation * world_size, || {
                text!("{accumulation} accumulated x {world_size} ranks", "累积 {accumulation} 次 x {world_size} 个 rank")
            })?,
            accumulation,
        )),
        (micro, None) => {
            // Without a batch size, the default where it divides, else one sample at a time.
            let each = |micro: usize| global.is_multiple_of(micro * world_size).then_some(micro);
            let micro = micro.unwrap_or_else(|| each(defaults.micro_batch).unwrap_or(1));
            let steps = divided(global, micro * world_size, || {
                text!("{micro} per rank x {world_size} ranks", "每个 rank {micro} x {world_size} 个 rank")
            })?;
            Ok((micro, steps))
        }
    }
}

fn divided(global: usize, by: usize, what: impl Fn() -> Text) -> Result<usize, Failure> {
    if global.is_multiple_of(by) {
        return Ok(global / by);
    }
    let below = global / by * by;
    let near = if below > 0 {
        text!("{below} or {}", "{below} 或 {}", below + by)
    } else {
        Text::literal(by)
    };
    Err(Failure::usage(
        text!(
            "--global-batch-size {global} cannot be divided",
            "--global-batch-size {global} 无法整除"
        ),
        text!(
            "{global} is not a multiple of {} = {by} samples",
            "{global} 不是 {} = {by} 个样本的整数倍",
            what()
        ),
    )
    .next(Text::literal(format_args!("--global-batch-size {near}"))))
}

/// Towers that recompute, from either spelling.
pub(super) fn recompute(args: &Args) -> Result<Recompute, Failure> {
    let meant = args
        .gradient_checkpointing
        .map(|on| if on { Recompute::ALL } else { Recompute::NONE });
    match (args.checkpoint_activations, meant) {
        // Some towers that recompute are a kind of gradient checkpointing.
        (Some(asked), Some(meant)) if (asked == Recompute::NONE) != (meant == Recompute::NONE) => {
            Err(Failure::usage(
                text!("--checkpoint-activations {asked} and --gradient-checkpointing {} contradict each other", "--checkpoint-activations {asked} 与 --gradient-checkpointing {} 互相矛盾",
                    meant == Recompute::ALL
                ),
                both("both select the activations that are recomputed", "两者都选择要重算的激活"),
            )
            .next(both("keep one of them", "请只保留其中一个")))
        }
        (asked, meant) => Ok(asked.or(meant).unwrap_or(Recompute::ALL)),
    }
}

/// Layers that share one kept input.
pub(super) fn num_layers(args: &Args) -> Result<usize, Failure> {
    let layers = args.checkpoint_num_layers.unwrap_or(1);
    if layers == 0 {
        return Err(out_of_range(
            "--checkpoint-num-layers 0",
            both("must be at least 1", "必须至少为 1"),
        ));
    }
    if layers > 1 && recompute(args)? == Recompute::NONE {
        return Err(Failure::usage(
            text!(
                "--checkpoint-num-layers {layers} has nothing to act on",
                "--checkpoint-num-layers {layers} 没有作用对象"
            ),
            both(
                "no tower recomputes activations in backward",
                "没有任何部分在反向传播中重算激活",
            ),
        )
        .next(both(
            "--checkpoint-activations all, or omit --checkpoint-num-layers",
            "请使用 --checkpoint-activations all，或去掉 --checkpoint-num-layers",
        )));
    }
    Ok(layers)
}

/// Tokens of a tile of the feed-forward layers.
pub(super) fn tile_tokens(args: &Args) -> Result<Option<NonZeroUsize>, Failure> {
    let zero = || {
        out_of_range(
            "--mlp-tile-tokens 0",
            both("must be at least 1", "必须至少为 1"),
        )
    };
    let tokens = args.mlp_tile_tokens;
    tokens
        .map(|tokens| NonZeroUsize::new(tokens).ok_or_else(zero))
        .transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::defaults::{DEMO, MODEL};

    fn env() -> Env {
        Env::from_lookup(&|name| (name == "MAX_PIXELS").then(|| "9000".into())).expect("reads")
    }

    #[test]
    fn bounds_of_images_come_from_flags_or_variables() {
        let bounds = |max, min| {
            let args = Args {
                image_max_pixels: max,
                image_min_pixels: min,
                ..Args::default()
            };
            resolve(&args, &env(), &MODEL, 1, &mut Vec::new())
                .map(|b| (b.image_max_pixels, b.image_min_pixels))
        };
        assert_eq!(bounds(None, None).expect("resolves"), (Some(9000), None));
        assert_eq!(
            bounds(Some(7), Some(7)).expect("resolves"),
            (Some(7), Some(7))
        );
        assert!(bounds(None, Some(9001)).is_err());
        let with = |name: &'static str, value: &'static str, args: &Args| {
            let lookup = |asked: &str| (asked == name).then(|| value.into());
            let env = Env::from_lookup(&lookup).expect("reads");
            resolve(args, &env, &MODEL, 1, &mut Vec::new())
        };
        let none = Args::default();
        let slices = with("MAX_SLICE_NUMS", "3", &none).expect("resolves");
        assert_eq!(slices.max_slice_nums, 3);
        for name in ["MAX_PIXELS", "MIN_PIXELS", "MAX_SLICE_NUMS"] {
            for value in ["1e5", "100000.0", "100*1000", "abc", "0"] {
                let refused = with(name, value, &none).expect_err(name);
                assert!(
                    refused.title.contains(&format!("{name}={value}")),
                    "{refused}"
                );
            }
        }
        let flag = Args {
            image_max_pixels: Some(7),
            ..Args::default()
        };
        with("MAX_PIXELS", "abc", &flag).expect("the flag counts");
    }

    fn of(
        micro: Option<usize>,
        accumulation: Option<usize>,
        global: Option<usize>,
    ) -> Result<(usize, usize), Failure> {
        let args = Args {
            per_device_train_batch_size: micro,
            gradient_accumulation_steps: accumulation,
            global_batch: global,
            ..Args::default()
        };
        resolve(&args, &env(), &MODEL, 2, &mut Vec::new())
            .map(|b| (b.micro_batch, b.accumulation_steps))
    }

    #[test]
    fn two_give_the_third() {
        for (micro, accumulation, global, sizes) in [
            (Some(3), Some(4), None, (3, 4)),
            (Some(3), None, Some(24), (3, 4)),
            (None, Some(4), Some(24), (3, 4)),
            (Some(3), Some(4), Some(24), (3, 4)),
            (None, None, Some(24), (1, 12)),
            (None, None, None, (1, 1)),
        ] {
            assert_eq!(of(micro, accumulation, global).expect("resolves"), sizes);
        }
        let demo = resolve(&Args::default(), &env(), &DEMO, 4, &mut Vec::new()).expect("resolves");
        assert_eq!((demo.micro_batch, demo.accumulation_steps), (8, 1));
    }

    #[test]
    fn contradictions_name_all_numbers() {
        for (sizes, parts) in [
            (
                (Some(3), Some(4), Some(25)),
                &["3 per rank x 4 accumulated x 2 ranks = 24", "25"][..],
            ),
            (
                (Some(5), None, Some(24)),
                &["5 per rank x 2 ranks = 10", "24"],
            ),
            ((None, Some(5), Some(24)), &["5 accumulated x 2 ranks = 10"]),
            ((None, None, Some(1)), &["1 per rank x 2 ranks = 2"]),
        ] {
            let failure = of(sizes.0, sizes.1, sizes.2).expect_err("refused");
            for part in parts {
                assert!(failure.to_string().contains(part), "{failure}");
            }
            assert_eq!(failure.code.status(), 2);
        }
        assert!(of(Some(0), None, None).is_err());
    }

    #[test]
    fn both_spellings_of_recomputation_must_agree() {
        let of = |towers: Option<&str>, switch| {
            recompute(&Args {
                checkpoint_activations: towers.map(|t| t.parse().expect("towers")),
                gradient_checkpointing: switch,
                ..Args::default()
            })
        };
        assert_eq!(of(None, None).expect("resolves"), Recompute::ALL);
        assert_eq!(of(None, Some(false)).expect("resolves"), Recompute::NONE);
        let llm = Recompute {
            llm: true,
            ..Recompute::NONE
        };
        assert_eq!(of(Some("llm"), Some(true)).expect("resolves"), llm);
        assert!(of(Some("none"), Some(true)).is_err());
        assert!(of(Some("llm"), Some(false)).is_err());
    }

    #[test]
    fn layers_share_an_input_only_where_something_is_computed_again() {
        let of = |layers, again: &str| {
            num_layers(&Args {
                checkpoint_num_layers: layers,
                checkpoint_activations: Some(again.parse().expect("towers")),
                ..Args::default()
            })
        };
        assert_eq!(of(None, "none").expect("resolves"), 1);
        assert_eq!(of(Some(1), "none").expect("resolves"), 1);
        assert_eq!(of(Some(6), "llm").expect("resolves"), 6);
        assert!(of(Some(0), "all").is_err());
        let refused = of(Some(2), "none").expect_err("refused").to_string();
        assert!(refused.contains("--checkpoint-num-layers 2"), "{refused}");
    }
}
