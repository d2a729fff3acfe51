//! `launcher plan`: memory and disk space of a run, without starting it.

#[cfg(all(test, feature = "cuda"))]
mod batches;
#[cfg(test)]
mod headline;
mod matrix;
mod nearest;
mod planner;
mod propose;
#[cfg(test)]
mod tests;
mod text;

use crate::cli::{Hardware, Note, PlanArgs, Preset, resolve_on};
use crate::commands::synth::published;
use crate::config::{Collectives, DEVICE, Device, DeviceChoice, Products, RunConfig, RunGpu};
use crate::device::survey::environment;
use crate::device::{self, Chosen, Devices};
use crate::error::output::print;
use crate::error::{ErrorCode, Failure, quoted};
use crate::lang::{Lang, Text, both, text};
use crate::launch::hostfile;
use crate::model::optimizer::{trained_parts, unused_rates};
use crate::model::setup::{shapes, unit_costs};
use crate::plan::disk_check::DiskCheck;
use crate::plan::rank_memory::{plan_event, shared_line, upload_line};
use crate::plan::{
    DESCRIBED_CAPABILITY, DESCRIBED_MULTIPROCESSORS, Settled, adapter_line, backward_line,
    backward_share, check_kernels, forward_line, pixel_line, quantized_event, resume, stage_line,
    stages,
};
use crate::rank_env::{Env, Variables};
use crate::ui::{Event, lines};
use crate::units::bytes;
use nearest::{Flags, Proposal, nearest};
use planner::Planner;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

/// Placeholder path of the data if the command line names none.
const NO_DATA: &str = "made-up-sample";

/// Plans the run of `args` and prints the result.
///
/// # Errors
/// Flags or files that training would also refuse, or kernels that this machine lacks; a run that does not fit (exit 5, 13
/// or 16).
pub(crate) fn run(
    args: &PlanArgs,
    typed: &[String],
    env: &Env,
    notes: &[Note],
    devices: &dyn Devices,
) -> Result<ExitCode, Failure> {
    let args = &named_model(args, env)?;
    let has_data = args.run.model.is_none() || args.run.data.is_some();
    let config = configuration(args, env, has_data, devices)?;
    let config = crate::commands::demo::prepare(config, env, &mut |_| ())?;
    resume::directory(&config)?;
    if args.hw.is_none() {
        check_kernels(&config)?;
    }
    let planner = Planner::new(&config, args, has_data)?;
    let json = args.json == Some(true);
    if args.matrix == Some(true) {
        let rows = matrix::rows(&planner, &config)?;
        let text = if json {
            pretty(&matrix::as_json(&rows))
        } else {
            Lang::chosen().speak(|| matrix::as_text(&config, &rows))
        };
        print(&text)?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.propose == Some(true) {
        let candidates = propose::candidates(&planner, &config, args)?;
        let text = if json {
            pretty(&propose::as_json(&candidates))
        } else {
            Lang::chosen().speak(|| propose::as_text(&config, &candidates, args))
        };
        print(&text)?;
        return Ok(ExitCode::SUCCESS);
    }
    let planned = planner.plan(&config)?;
    let disk = planner.disk_check(&planned)?;
    let fits = planned.fit.fits();
    let near = if fits {
        Vec::new()
    } else {
        nearest(&planner, &config)?
    };
    if json {
        print(&pretty(&as_json(&planned, &disk, &planner, typed, &near)?))?;
    } else {
        let text = || as_text(&planned, &disk, &planner, notes, args);
        print(&Lang::chosen().speak(text)?)?;
    }
    planned
        .fit
        .check(&planned.run, &planned.memory)
        .map_err(|failure| with_nearest(failure, typed, &near))?;
    disk.check(&planned.run)?;
    Ok(ExitCode::SUCCESS)
}

/// The arguments with the path of a `config.json`, where `--model` names a published model instead of a path and
/// no data is given.
///
/// # Errors
/// The file cannot be written to the cache directory (exit 10).
fn named_model(args: &PlanArgs, env: &Env) -> Result<PlanArgs, Failure> {
    let mut args = args.clone();
    // Samples need the tokenizer, so a plan with data needs the model's directory.
    let has_data = args.run.data.is_some() || args.run.dataset.is_some();
    let is_absent = |model: &&PathBuf| !models::places::main(model).exists();
    let named = args.run.model.as_ref().filter(is_absent);
    let Some(model) = named.filter(|_| !has_data) else {
        return Ok(args);
    };
    let Some((name, text)) = published(model) else {
        return Ok(args);
    };
    let directory = env.cache_dir.join("published").join(name);
    let file = directory.join("config.json");
    let written = std::fs::create_dir_all(&directory).and_then(|()| std::fs::write(&file, text));
    written.map_err(|error| {
        Failure::io(ErrorCode::ModelFiles, both("write", "写入"), &file, &error)
    })?;
    args.run.model = Some(directory);
    args.no_weights = Some(true);
    Ok(args)
}

/// Configuration of `args`, on the machine that they describe.
///
/// # Errors
/// As training with the same flags.
fn configuration(
    args: &PlanArgs,
    env: &Env,
    has_data: bool,
    devices: &dyn Devices,
) -> Result<RunConfig, Failure> {
    let mut run = args.run.clone();
    if !has_data {
        run.data = Some(PathBuf::from(NO_DATA));
        run.eval_data = None;
    }
    if let Some(hardware) = args.hw {
        run.nproc = run.nproc.or(Some(hardware.devices));
        if run.nproc != Some(hardware.devices) {
            return Err(Failure::usage(
                both(
                    "--nproc and --hw contradict each other",
                    "--nproc 与 --hw 互相矛盾",
                ),
                text!(
                    "one rank runs on each of {} devices",
                    "{} 个设备各运行一个 rank",
                    hardware.devices
                ),
            )
            .next(both("omit --nproc", "请去掉 --nproc")));
        }
    }
    let machines = hostfile::planned(&run, &mut |_| ())?;
    if machines.is_some() {
        // A run on several machines needs one; a plan writes nothing.
        run.output = run.output.or(Some(PathBuf::from(".")));
    }
    let env = &Env {
        node: machines.or_else(|| env.node.clone()),
        ..env.clone()
    };
    let choice = run.device.unwrap_or(DEVICE);
    let chosen = match args.hw {
        // The backend plans for described GPUs as for real ones.
        Some(hardware) if choice == DeviceChoice::Cuda => {
            let fused = Variables::read().fused_attention_backward()?;
            described(hardware, run.collectives == Some(Collectives::Ipc), fused)
        }
        Some(_) => Chosen::cpu(),
        None => device::choose(choice, devices, &Variables::read())?,
    };
    Ok(resume::continued(
        resolve_on(&run, env, &chosen)?.config,
        &run,
    ))
}

/// GPUs of a described machine. With `linked` all have peer access to each other.
fn described(hardware: Hardware, linked: bool, fused: bool) -> Chosen {
    let count = u32::try_from(hardware.devices).unwrap_or(u32::MAX);
    let others = |ordinal| (0..count).filter(move |other| *other != ordinal);
    let gpu = |ordinal| RunGpu {
        ordinal,
        name: "described".to_owned(),
        uuid: None,
        multiprocessors: DESCRIBED_MULTIPROCESSORS,
        compute_capability: Some(DESCRIBED_CAPABILITY),
        memory_bytes: hardware.device_bytes,
        free_bytes: hardware.device_bytes,
        peers: if linked {
            others(ordinal).collect()
        } else {
            Vec::new()
        },
        // cuBLASLt needs more scratch memory than the own kernels.
        products: Products::CublasLt,
        fused_attention_backward: fused,
    };
    Chosen::described((0..count).map(gpu).collect())
}

fn as_json(
    planned: &Settled,
    disk: &DiskCheck,
    planner: &Planner,
    typed: &[String],
    near: &[Proposal],
) -> Result<Value, Failure> {
    let (total, trainable) = planned.plan.spec().elems();
    let config = &planned.run;
    let proposals: Vec<Value> = near
        .iter()
        .map(|proposal| {
            json!({
                "flags": spelled(&proposal.flags),
                "command": command(typed, &proposal.flags),
                "need_bytes": needs(&proposal.planned),
            })
        })
        .collect();
    let model = shapes(config)?.0;
    let trains = trained_parts(config, &*model)?;
    let costs = || unit_costs(config, &*model);
    let stages = stages::described(config, &planned.plan, &planned.memory, &costs)?;
    Ok(json!({
        "model": config.name(),
        "parameters_total": total,
        "parameters_trainable": trainable,
        "ranks": config.world_size,
        "stage": config.zero,
        "zero_auto": config.zero_auto,
        "precision": planned.plan.config().precision.name(),
        "offload": config.offload.to_string(),
        "micro_batch": config.batch.micro_batch,
        "accumulation_steps": config.batch.accumulation_steps,
        "uploads_ahead": planned.plan.prefetch_weights(),
        "early_step": config.optimizer_in_backward.to_string(),
        "early_share": backward_share(&planned.plan),
        "late_step": planned.plan.updates_in_forward(),
        "checkpoint_activations": config.checkpoint_activations.to_string(),
        "checkpoint_num_layers": config.checkpoint_num_layers,
        "mlp_tile_tokens": config.mlp_tile_tokens,
        "sample": if planner.makes_up_samples() { "made-up" } else { "data" },
        "bytes_per_rank": planned.memory.phases,
        "peak_bytes_per_rank": planned.memory.peak,
        "need_bytes": needs(planned),
        "have_bytes": {
            "device_per_rank": planned.fit.device_limit(),
            "host": planned.fit.machine.usable_host_bytes(),
            "host_free": planned.fit.machine.host_free_bytes,
            "host_reserve": planned.fit.machine.host_reserve_bytes,
            "nvme": planned.fit.machine.nvme_free_bytes,
            "window": planned.fit.machine.window_free_bytes,
        },
        "checkpoint_bytes": {
            "state": disk.checkpoint.state,
            "weights": disk.checkpoint.weights,
            "at_once": disk.most,
            "free": disk.free,
        },
        "fits": planned.fit.fits() && disk.check(config).is_ok(),
        "trains": trains,
        "stages": stages,
        "quantized": match quantized_event(planned.plan.spec()) {
            Some(Event::Quantized(weights)) => json!(weights),
            _ => Value::Null,
        },
        "nearest": proposals.first(),
        "proposals": proposals,
    }))
}

fn needs(planned: &Settled) -> Value {
    let need = planned.fit.need;
    json!({
        "device_per_rank": need.device,
        "host": need.host,
        "nvme": need.nvme,
        "window": need.window,
    })
}

fn as_text(
    planned: &Settled,
    disk: &DiskCheck,
    planner: &Planner,
    notes: &[Note],
    args: &PlanArgs,
) -> Result<String, Failure> {
    let Settled {
        run: config,
        plan,
        memory,
        fit,
        spare,
        lower_stage,
        ..
    } = planned;
    let mut text = String::new();
    for note in notes {
        text += &shown(
            &Event::Note {
                flag: note.flag.clone(),
                reason: note.reason.clone(),
            },
            usize::MAX,
        );
    }
    for event in environment::stand_ins(&Variables::read()) {
        text += &shown(&event, usize::MAX);
    }
    if let Some(preset) = args.run.preset.as_deref().and_then(Preset::named) {
        text += &shown(
            &Event::Info {
                label: both("preset", "预设").into(),
                text: Text::literal(format_args!("{}: {}", preset.script, preset.spelled())),
            },
            usize::MAX,
        );
    }
    let mut event = plan_event(config, plan, memory, fit);
    if args.hw.is_some() && config.device == Device::Cpu {
        event.device = "devices".into();
        let line = Event::Info {
            label: both("device", "设备").into(),
            text: both(
                "planned as the CPU runs it; --device cuda plans for GPUs",
                "按 CPU 上的运行方式计划；--device cuda 为 GPU 做计划",
            )
            .into(),
        };
        text += &shown(&line, usize::MAX);
    }
    // The event's last line is the verdict of training. This subcommand prints its own.
    text += &shown(&Event::Plan(event), 2);
    let first = [
        stage_line(config, lower_stage.as_ref()),
        upload_line(plan, None),
        shared_line(plan),
    ];
    for line in first.into_iter().flatten() {
        text += &shown(&line, usize::MAX);
    }
    let model = shapes(config)?.0;
    let trains = trained_parts(config, &*model)?;
    let costs = || unit_costs(config, &*model);
    for line in stages::lines(stages::described(config, plan, memory, &costs)?) {
        text += &shown(&line, usize::MAX);
    }
    for line in [
        backward_line(plan, spare.as_ref()),
        forward_line(plan),
        Some(Event::Trains(trains)),
        quantized_event(plan.spec()),
        adapter_line(config),
        pixel_line(config),
    ]
    .into_iter()
    .flatten()
    .chain(unused_rates(config, &*model)?)
    {
        text += &shown(&line, usize::MAX);
    }
    if planner.makes_up_samples() {
        let sample = planner.sample(config)?;
        let (tokens, patches, slices) = (
            sample.input_ids.len(),
            sample.patches(),
            sample.slices.len(),
        );
        let shows = match planner.frames() {
            None => text!(
                "an image of {patches} patches in {slices} slices",
                "一张图片有 {patches} 个 patch、{slices} 个切片"
            ),
            Some(frames) => text!(
                "a video of {frames} frames in {patches} patches",
                "一段 {frames} 帧的视频有 {patches} 个 patch"
            ),
        };
        text += &shown(
            &Event::Info {
                label: both("sample", "样本").into(),
                text: text!(
                    "no data is given: an artificial sample of {tokens} tokens, all supervised, with {shows}",
                    "没有给出数据：使用 {tokens} 个 token 的人造样本，全部被监督，其中{shows}"
                ),
            },
            usize::MAX,
        );
    }
    if args.hw.is_some() {
        let tier = memory.phases.values().map(|phase| {
            let states = ["parameters", "gradients", "optimizer", "activations"];
            states
                .iter()
                .filter_map(|kind| phase.host.get(*kind))
                .sum::<u64>()
        });
        let most = tier.max().unwrap_or(0);
        let limit = crate::memory::lockable_bytes();
        text += &shown(
            &Event::Info {
                label: both("memlock", "锁页").into(),
                text: text!(
                    "copies to devices are fastest from locked host memory: {} per rank; this shell can lock {}",
                    "从锁定的主机内存复制到设备最快：每个 rank {}；当前 shell 可锁定 {}",
                    bytes(most),
                    limit.map_or_else(
                        || both("any amount", "任意数量").into(),
                        |most| Text::literal(bytes(most))
                    )
                ),
            },
            usize::MAX,
        );
    }
    text += &text::table(memory);
    text += &shown(&disk.event(config), usize::MAX);
    let reserve = Event::Info {
        label: both("reserve", "预留").into(),
        text: fit.machine.host_text(),
    };
    text += &shown(&reserve, usize::MAX);
    text += &text::verdict(fit);
    Ok(text)
}

/// The first `most` lines of an event as text.
fn shown(event: &Event, most: usize) -> String {
    let lines = lines(event).into_iter().take(most);
    lines.map(|line| line + "\n").collect()
}

fn with_nearest(mut failure: Failure, typed: &[String], near: &[Proposal]) -> Failure {
    let general = std::mem::take(&mut failure.next);
    for proposal in near {
        let needs = proposal.planned.fit.needs();
        let what = match (proposal.quantizes(), proposal.freezes) {
            (true, _) => both("quantized frozen weights fit", "量化冻结的权重就放得下"),
            (false, true) => both("the adapters alone fit", "只训练适配器就放得下"),
            (false, false) => both("nearest setting that fits", "最接近的可行设置"),
        };
        failure = failure
            .next(text!("{what}: {needs}", "{what}：{needs}"))
            .next(Text::literal(command(typed, &proposal.flags)));
    }
    if near.is_empty() {
        failure = failure.next(both(
            "no stage, offload, batch, precision, adapters or quantized weights make it fit",
            "改变阶段、卸载、批大小、精度、只训练适配器或量化权重都放不下",
        ));
    }
    failure.next.extend(general);
    failure
}

/// The typed command line with `flags` changed.
fn command(typed: &[String], flags: &Flags) -> String {
    let name = |word: &str| {
        word.trim_start_matches("--")
            .split('=')
            .next()
            .map(str::to_owned)
    };
    // Micro-batch and accumulation steps replace the global batch.
    let sized = flags
        .iter()
        .any(|(flag, _)| *flag == "gradient-accumulation-steps");
    let kept = typed.iter().filter(|word| {
        let name = name(word).unwrap_or_default();
        let replaced = name == "json" || flags.iter().any(|(flag, _)| *flag == name);
        let sizes = sized && matches!(&*name, "global-batch-size" | "find-batch");
        !(replaced || sizes)
    });
    let kept: Vec<String> = kept.map(|word| quoted(word)).collect();
    format!("launcher plan {} {}", kept.join(" "), spelled(flags))
}

pub(super) fn spelled(flags: &Flags) -> String {
    let flags: Vec<String> = flags.iter().map(|(n, v)| format!("--{n} {v}")).collect();
    flags.join(" ")
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}
