//! Checks and planning before a rank starts and before the run's directory is touched.

use super::disk_check::{DiskCheck, saves};
use super::origin::origin;
use super::rank_memory::{
    device_line, eval_line, plan_event, shared_line, upload_line, whole_memory,
};
use super::{
    Counted, Machine, Settled, Suggestions, backward_line, find_batch, forward_line, resume,
    settle, spill_directories, stage_line, stages, suggestion,
};
use crate::config::{Device, Found, RunConfig, RunPlan, check_faults, fault_lines};
use crate::data::images::LargestImage;
use crate::data::{SampleSet, Sampler, Taken, check};
use crate::error::Failure;
use crate::error::failures::unusable;
use crate::lang::{Both, Text, both, text};
use crate::model::contents::CheckpointBytes;
use crate::model::optimizer::{rule, trained_parts, unused_rates};
use crate::model::setup::{self, Setup};
use crate::ui::{DataEvent, Event, QuantizedEvent};
use engine::plan::Formats;
use engine::{ModelSpec, Tier};
use kernels::DType;
use models::{Family, Processor, VisionLanguageModel};
use optim::Optimizer;
use std::sync::Arc;

/// Checks model, data, memory and disk, and resolves what `draft` leaves open. Runs before a rank starts and before
/// the run's directory is touched. Output goes to `show`.
///
/// # Errors
/// Anything found that would make the run fail later.
pub(crate) fn prepare(
    draft: &RunPlan,
    show: &mut dyn FnMut(Event),
) -> Result<(RunPlan, Suggestions), Failure> {
    let setup = Setup::open(draft)?;
    setup.check_weights(show)?;
    let limit = draft.batch.limit;
    let mut progress = |text| {
        let label = both("images", "图片").into();
        show(Event::Info { label, text });
    };
    let processor = &*setup.processor;
    let train = check::check(
        draft,
        &draft.data_file(),
        Taken::Training(limit),
        processor,
        &mut progress,
    )?;
    let eval = match draft.eval_file() {
        Some(path) => Some(check::check(
            draft,
            &path,
            Taken::HeldOut,
            processor,
            &mut progress,
        )?),
        None => None,
    };
    for set in std::iter::once(&train).chain(&eval) {
        show_files(set, draft.is_demo(), show);
    }
    let mut draft = draft.with_found(Found {
        image_bytes: image_bytes(&train, eval.as_ref()),
        ..draft.found().clone()
    });
    if draft.batch.find_batch {
        draft = find_batch::find(&draft, &setup, &train, show)?;
    }
    draft = draft.with_found(Found {
        first_samples: check::first_samples(&draft, &train),
        ..draft.found().clone()
    });
    let worst = check::largest(&train, &draft, &*setup.processor)?;
    let (model, processor) = (&*setup.model, &*setup.processor);
    let settled = settle(&draft, &Machine::here, &mut |run| {
        let plan = Arc::new(setup.plan(run)?);
        let (memory, eval_batch) =
            whole_memory(run, model, processor, &plan, &worst, eval.as_ref())?;
        Ok(Counted {
            plan,
            memory,
            eval_batch,
        })
    })?;
    let config = settled.run.config();
    eval_line(draft.batch.eval_batch, config.batch.eval_batch)
        .into_iter()
        .for_each(&mut *show);
    let per_epoch = train.mix().per_epoch();
    let sampler = Sampler::of(config, &train, &draft.found().first_samples);
    let total_steps = sampler.total_steps(config);
    check_faults(config, total_steps)?;
    for text in fault_lines(config) {
        show(Event::Warning { text });
    }
    resume::check(config, &settled.plan, &sampler, total_steps)?;
    show_plan(&settled, model, show)?;
    show(data_event(&sampler, &train, eval.as_ref()));
    let fit = &settled.fit;
    if let Err(mut failure) = fit.check(config, &settled.memory) {
        if let Some(image) = largest_image(&train, eval.as_ref()).filter(|_| fit.exceeds_host()) {
            failure = failure.evidence(text!(
                "the largest image: {}",
                "最大的图片：{}",
                image.describe()
            ));
        }
        let mut count = suggestion::counter(&train, eval.as_ref(), processor);
        suggestion::add(&mut failure, &settled.run, &mut count);
        return Err(failure);
    }
    let origin = origin(config, model, setup.weights.as_ref(), &train)?;
    let accepted = resume::compare(config, &origin, per_epoch, show)?;
    let checkpoint = CheckpointBytes::of(config, model, &settled.plan, setup.weights.as_ref())?;
    let saves = saves(config, total_steps, sampler.steps_per_epoch());
    let disk = DiskCheck::of(config, checkpoint, saves, fit.need.nvme);
    disk.check(config)?;
    if let warning @ Event::Warning { .. } = disk.event(config) {
        show(warning);
    }
    spill_directories::sweep(config, show)?;
    let taken = settled.spare.and_then(|spare| spare.taken);
    let sizes = (train.sizes, eval.map(|set| set.sizes));
    let suggestions = suggestion::later(&settled.run, sizes, taken);
    let run = settled.run.with_found(Found {
        origin: Some(origin),
        resumed_anyway: accepted,
        ..settled.run.found().clone()
    });
    Ok((run, suggestions))
}

/// The image of both sets that takes the most memory.
fn largest_image<'a>(
    train: &'a SampleSet,
    eval: Option<&'a SampleSet>,
) -> Option<&'a LargestImage> {
    let sets = std::iter::once(train).chain(eval);
    let images = sets.filter_map(|set| set.largest_image.as_ref());
    images.max_by_key(|image| image.bytes)
}

/// Most bytes that the decoding of one image of the checked sets takes.
pub(crate) fn image_bytes(train: &SampleSet, eval: Option<&SampleSet>) -> Option<u64> {
    Some(largest_image(train, eval).map_or(0, |image| image.bytes))
}

/// Shows the form of each file that the user brought, and what of it the model does not see.
fn show_files(set: &SampleSet, is_demo: bool, show: &mut dyn FnMut(Event)) {
    for file in set.files.iter().filter(|_| !is_demo) {
        let label = both("form", "格式").into();
        let text = file.form();
        show(Event::Info { label, text });
    }
    if let Some(text) = set.mix().line() {
        let label = both("mix", "混合").into();
        show(Event::Info { label, text });
    }
    for text in set.unseen() {
        show(Event::Warning { text });
    }
}

/// Shows the result of planning: memory, formats, updates, trained parts and batch.
fn show_plan(
    settled: &Settled,
    model: &dyn VisionLanguageModel,
    show: &mut dyn FnMut(Event),
) -> Result<(), Failure> {
    let Settled {
        run,
        plan,
        memory,
        fit,
        spare,
        prefetch,
        lower_stage,
    } = settled;
    show(Event::Plan(plan_event(run, plan, memory, fit)));
    let device = (run.device == Device::Cuda).then(|| device_line(run, memory, fit));
    let formats = plan.formats(rule(run).slots(plan.config().precision));
    let formats = Event::Info {
        label: both("formats", "数值").into(),
        text: formats_text(&formats),
    };
    let lines = [
        stage_line(run, lower_stage.as_ref()),
        device,
        upload_line(plan, prefetch.as_ref()),
        shared_line(plan),
        Some(formats),
        backward_line(plan, spare.as_ref()),
        forward_line(plan),
    ];
    lines.into_iter().flatten().for_each(&mut *show);
    let costs = || setup::unit_costs(run, model);
    stages::lines(stages::described(run, plan, memory, &costs)?)
        .into_iter()
        .for_each(&mut *show);
    show(Event::Trains(trained_parts(run, model)?));
    quantized_event(model.spec())
        .into_iter()
        .for_each(&mut *show);
    let lines = [adapter_line(run), pixel_line(run)];
    lines.into_iter().flatten().for_each(&mut *show);
    unused_rates(run, model)?.into_iter().for_each(&mut *show);
    show(find_batch::line(run));
    Ok(())
}

/// Number formats and tiers of all states, in one line.
fn formats_text(formats: &Formats) -> Text {
    let place = |tier: Tier| match tier {
        Tier::Device => "设备",
        Tier::Host => "主机",
        Tier::Nvme => "nvme",
    };
    let short = |dtype: DType| dtype.to_string().to_lowercase();
    let (states, tier) = &formats.optimizer;
    let states = states.iter();
    let states: Vec<String> = states
        .map(|(name, dtype)| format!("{name} {}", short(*dtype)))
        .collect();
    Text::new(
        formats.to_string(),
        format!(
            "权重 {}（{}） · 梯度以 {} 归约，以 {} 累加（{}） · {}（{}） · 保存的激活（{}）",
            short(formats.weights.0),
            place(formats.weights.1),
            short(formats.reduced),
            short(formats.accumulated.0),
            place(formats.accumulated.1),
            states.join("、"),
            place(*tier),
            place(formats.activation),
        ),
    )
}

/// Line about the bounds of image areas, if the run has any: only GLM-4.1V's images have them.
pub(crate) fn pixel_line(config: &RunConfig) -> Option<Event> {
    let batch = &config.batch;
    let bounds = [
        (
            "--image-max-pixels",
            both("at most", "最多"),
            batch.image_max_pixels,
        ),
        (
            "--image-min-pixels",
            both("at least", "最少"),
            batch.image_min_pixels,
        ),
    ];
    let given = bounds
        .iter()
        .filter_map(|(flag, word, area)| area.map(|area| (*flag, *word, area)));
    let given: Vec<(&str, Both, usize)> = given.collect();
    let (flag, ..) = given.first()?;
    let reason = match Family::of(&config.model_dir()).ok()? {
        Family::Glm41v => {
            let bounds = given.iter();
            let bounds = bounds.map(|(_, word, area)| text!("{word} {area}", "{word} {area} "));
            let bounds: Vec<Text> = bounds.collect();
            return Some(Event::Info {
                label: both("images", "图片").into(),
                text: text!("resized to {} pixels", "缩放到{}像素", Text::list(&bounds)),
            });
        }
        Family::MiniCpm => both(
            "--max-slice-nums limits the slices of an image",
            "--max-slice-nums 限制每张图片的切片数",
        ),
        Family::Glm4v | Family::CogVlm | Family::CogVlm2 | Family::CogAgent => both(
            "every image is resized to the size that config.json names",
            "每张图片都缩放到 config.json 指定的大小",
        ),
    };
    Some(Event::Note {
        flag: (*flag).to_owned(),
        reason: reason.into(),
    })
}

/// Line about the adapters: rank, alpha and scale; `None` without adapters.
pub(crate) fn adapter_line(config: &RunConfig) -> Option<Event> {
    let lora = config.trainable.lora.as_ref()?;
    let (rank, alpha) = (lora.lora_rank, lora.lora_alpha);
    let scale = lora.scale();
    let root = if lora.use_rslora { "√" } else { "" };
    let ratio = lora.loraplus_lr_ratio.map(|ratio| {
        text!(
            " · B learns {ratio} times as fast",
            " · B 的学习率为 {ratio} 倍"
        )
    });
    let ratio = ratio.unwrap_or_default();
    let start = lora.adapter.as_ref().map(|dir| {
        let dir = dir.display();
        text!(" · starts from {dir}", " · 从 {dir} 开始")
    });
    let start = start.unwrap_or_default();
    Some(Event::Info {
        label: both("lora", "lora").into(),
        text: text!(
            "rank {rank} · alpha {alpha} · scale {scale} (alpha ÷ {root}rank) · dropout {}{ratio}{start}",
            "秩 {rank} · alpha {alpha} · 缩放 {scale}（alpha ÷ {root}秩）· dropout {}{ratio}{start}",
            lora.lora_dropout
        ),
    })
}

/// Event that shows the quantized weights of `spec`, if it has any.
pub(crate) fn quantized_event(spec: &ModelSpec) -> Option<Event> {
    let mut event = QuantizedEvent {
        formats: Vec::new(),
        tensors: 0,
        params: 0,
        bytes: 0,
    };
    for param in &spec.params {
        let Some(quantization) = param.stored_quantization() else {
            continue;
        };
        let format = quantization.to_string();
        if !event.formats.contains(&format) {
            event.formats.push(format);
        }
        event.tensors += 1;
        event.params += param.shape.elems() as u64;
        event.bytes += quantization.bytes(param.shape) as u64;
    }
    (event.tensors > 0).then_some(Event::Quantized(event))
}

/// Event that shows the number and size of the samples and images.
fn data_event(sampler: &Sampler, train: &SampleSet, eval: Option<&SampleSet>) -> Event {
    Event::Data(DataEvent {
        samples: train.samples.len(),
        eval_samples: eval.map_or(0, |e| e.samples.len()),
        longest_tokens: train.sizes.iter().map(|s| s.tokens).max().unwrap_or(0),
        images: train.image_count + eval.map_or(0, |e| e.image_count),
        supervised_min_tokens: train.sizes.iter().map(|s| s.supervised).min().unwrap_or(0),
        skipped: train.problems.len() + eval.map_or(0, |e| e.problems.len()),
        wraps_around_global_batch: sampler.wraps_around(),
    })
}

/// Reads and checks the samples for `launcher plan`.
///
/// # Errors
/// As [`prepare`].
pub(crate) fn check_data(
    config: &RunConfig,
) -> Result<(Arc<dyn Processor>, SampleSet, Option<SampleSet>), Failure> {
    let dir = config.model_dir();
    let processor = models::open_processor(&dir).map_err(|e| unusable(&dir, &e))?;
    let (limit, mut quiet) = (config.batch.limit, |_| ());
    let train = check::check(
        config,
        &config.data_file(),
        Taken::Training(limit),
        &*processor,
        &mut quiet,
    )?;
    let eval = config.eval_file();
    let eval =
        eval.map(|path| check::check(config, &path, Taken::HeldOut, &*processor, &mut quiet));
    Ok((processor, train, eval.transpose()?))
}
