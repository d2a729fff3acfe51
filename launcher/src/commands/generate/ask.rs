//! `launcher generate`: one prompt, one answer.

use super::model::{LoadedModel, OpenModel, positive, required};
use super::note;
use crate::cli::GenerateArgs;
use crate::config::ExifRotation;
use crate::data::problems;
use crate::error::output::print;
use crate::error::{ErrorCode, Failure, chain, failures};
use crate::lang::{Text, both, text};
use crate::memory;
use crate::units::{bytes as format_bytes, seconds as format_seconds};
use models::SampleInput;
use models::data::SINGLE_IMAGE;
use models::data::{EncodeOptions, EncodedPrompt, PlaceholderStyle, RawSample, SampleError};
use models::generate::{GenerateOptions, Prompt, Sampling, cache_bytes, generate};
use models::image::ImageFolder;
use models::places;
use models::text::Message;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

const DEFAULT_NEW_TOKENS: usize = 256;
const DEFAULT_PROMPT_TOKENS: usize = 8192;
const DEFAULT_SLICES: usize = 9;
const DEFAULT_SEED: u64 = 42;

/// Prints the answer to the prompt of `args` on standard output, and times on standard error.
///
/// # Errors
/// Invalid flags; a model, adapter or image that cannot be used; a prompt that is too long.
pub(crate) fn run(args: &GenerateArgs) -> Result<ExitCode, Failure> {
    let dir = required(args.model.as_ref(), "generate", "--model")?;
    let dir = &places::with_tokenizer(dir, args.tokenizer.as_deref());
    let prompt = required(args.prompt.as_deref(), "generate", "--prompt")?;
    let max_new_tokens = args.max_new_tokens.unwrap_or(DEFAULT_NEW_TOKENS);
    let max_new_tokens = positive(max_new_tokens, "--max-new-tokens")?;
    let longest = args.model_max_length.unwrap_or(DEFAULT_PROMPT_TOKENS);
    let slices = args.max_slice_nums.unwrap_or(DEFAULT_SLICES);
    let sampling = Sampling {
        temperature: args.temperature.unwrap_or(0.0),
        top_p: args.top_p.unwrap_or(1.0),
        top_k: args.top_k.unwrap_or(0),
        seed: args.seed.unwrap_or(DEFAULT_SEED),
    };
    sampling.check().map_err(|e| {
        Failure::usage(
            both("a sampling setting is out of range", "某个采样设置超出范围"),
            chain(&e),
        )
        .next(both(
            "--temperature must be at least 0, --top-p above 0 and at most 1",
            "--temperature 必须不小于 0，--top-p 必须大于 0 且不大于 1",
        ))
    })?;
    let open = OpenModel::open(dir, args.adapter.as_deref(), args.precision)?;
    let options = EncodeOptions {
        model_max_length: longest,
        max_slice_nums: Some(positive(slices, "--max-slice-nums")?),
        prompt: args.template.unwrap_or_default().style(),
        enable_thinking: args.enable_thinking,
        ..EncodeOptions::default()
    };
    // A path on the command line may name any file.
    let images = ImageFolder::new(".")
        .allow_outside(true)
        .upright(args.exif_rotation == Some(ExifRotation::Apply));
    let encoded = encode(&open, &question(prompt, &args.image), &images, &options)?;
    let asked = Prompt {
        input: SampleInput::from(&encoded),
        index: 0,
        max_new_tokens,
    };
    let cache = cache_bytes(open.model.cache_shape(), &[asked]);
    let loaded = open.load(cache)?;
    note(&loaded.summary);
    let answer = answer(&loaded, asked, sampling)?;
    note(answer.times(encoded.input_ids.len(), cache));
    if args.json == Some(true) {
        let record = json!({
            "answer": answer.text,
            "tokens": answer.tokens,
            "stopped_by": if answer.tokens == max_new_tokens { "length" } else { "end" },
            "prompt_tokens": encoded.input_ids.len(),
            "slices": encoded.slices.len(),
            "prefill_seconds": answer.prefill_seconds,
            "decode_seconds": answer.decode_seconds,
        });
        return print(&format!("{record:#}\n"));
    }
    print(&format!("{}\n", answer.text))
}

/// Sample with one turn of the user. Images precede the text unless the text places them.
fn question(prompt: &str, images: &[PathBuf]) -> RawSample {
    let single = images.len() == 1 && !prompt.contains("<image_0");
    let name = |i: usize| match single {
        true => SINGLE_IMAGE.to_owned(),
        false => format!("<image_{i:02}>"),
    };
    let names: Vec<String> = (0..images.len()).map(name).collect();
    let placed = names.iter().any(|name| prompt.contains(name));
    let content = match placed || names.is_empty() {
        true => prompt.to_owned(),
        false => format!("{}\n{prompt}", names.join("\n")),
    };
    RawSample {
        images: names.into_iter().zip(images.iter().cloned()).collect(),
        conversations: vec![Message::new("user", content)],
        ..RawSample::default()
    }
}

fn encode(
    open: &OpenModel,
    sample: &RawSample,
    images: &ImageFolder,
    options: &EncodeOptions,
) -> Result<EncodedPrompt, Failure> {
    let style = PlaceholderStyle::Training;
    let encoded = open
        .processor
        .encode_prompt(sample, images, options, style)
        .map_err(|error| refuse(&error))?;
    let tokens = encoded.input_ids.len();
    if tokens <= options.model_max_length {
        return Ok(encoded);
    }
    let longest = options.model_max_length;
    Err(Failure::new(
        ErrorCode::Samples,
        text!(
            "the prompt has {tokens} tokens, more than --model-max-length {longest}",
            "提示有 {tokens} 个 token，超过了 --model-max-length {longest}"
        ),
        both("prompts are never truncated", "提示从不截断"),
    )
    .evidence(text!(
        "{} image slices",
        "{} 个图片切片",
        encoded.slices.len()
    ))
    .next(both(
        "use a higher --model-max-length, a lower --max-slice-nums, or fewer images",
        "请提高 --model-max-length、降低 --max-slice-nums，或减少图片",
    )))
}

fn refuse(error: &SampleError) -> Failure {
    let (code, _) = problems::classify(error);
    Failure::new(code, both("the prompt cannot be used", "提示无法使用"), chain(error))
        .next(both("give --image FILE with a readable image; in --prompt use <image> or <image_00>, <image_01>, … at most once each", "请用 --image FILE 给出可读的图片；在 --prompt 中使用 <image> 或 <image_00>、<image_01>……，每个最多一次"))
}

struct Answered {
    text: String,
    tokens: usize,
    /// Number of passes of one token after the prompt's pass. The last one may have ended the answer.
    passes: usize,
    prefill_seconds: f64,
    decode_seconds: f64,
}

impl Answered {
    fn times(&self, prompt_tokens: usize, cache: u64) -> Text {
        let rate = |tokens: usize, seconds: f64| tokens as f64 / seconds.max(1e-9);
        text!(
            "prompt  {prompt_tokens} tokens in {} · {:.1} per second\n \
             answer  {} tokens in {} · {:.1} per second\n \
             memory  peak {} · cache {}",
            "提示    {prompt_tokens} 个 token，用时 {} · 每秒 {:.1} 个\n \
             回答    {} 个 token，用时 {} · 每秒 {:.1} 个\n \
             内存    峰值 {} · 缓存 {}",
            format_seconds(self.prefill_seconds),
            rate(prompt_tokens, self.prefill_seconds),
            self.tokens,
            format_seconds(self.decode_seconds),
            rate(self.passes, self.decode_seconds),
            format_bytes(memory::process().peak_rss_bytes),
            format_bytes(cache),
        )
    }
}

fn answer(
    loaded: &LoadedModel,
    prompt: Prompt<'_>,
    sampling: Sampling,
) -> Result<Answered, Failure> {
    let options = GenerateOptions {
        sampling,
        stop_ids: loaded.processor.stop_ids(),
    };
    let started = Instant::now();
    // Called before every pass: at the second call the prompt's pass is done.
    let mut asked = Vec::new();
    let mut anyone_left = |left: bool| {
        asked.push(started.elapsed().as_secs_f64());
        Ok(left)
    };
    let prompts = [prompt];
    let (model, access) = (&loaded.model, &loaded.access);
    let mut answers = generate(&**model, access, &prompts, &options, &mut anyone_left)
        .map_err(|e| failures::model(both("generate an answer", "生成回答"), &e))?;
    let tokens = answers.pop().unwrap_or_default();
    let text = loaded
        .processor
        .decode(&tokens)
        .map_err(|e| refuse(&SampleError::from(e)))?;
    let prefill_seconds = asked.get(1).copied().unwrap_or_default();
    let end = asked.last().copied().unwrap_or_default();
    Ok(Answered {
        text: text.trim().to_owned(),
        tokens: tokens.len(),
        passes: asked.len().saturating_sub(2),
        prefill_seconds,
        decode_seconds: end - prefill_seconds,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_come_before_the_prompt_unless_it_has_markers() {
        let ask = |prompt: &str, count: usize| {
            let images: Vec<PathBuf> = (0..count).map(|i| format!("{i}.png").into()).collect();
            let sample = question(prompt, &images);
            let names: Vec<String> = sample.images.iter().map(|(name, _)| name.clone()).collect();
            (sample.conversations[0].content.clone(), names.join(" "))
        };
        let pair = |content: &str, names: &str| (content.to_owned(), names.to_owned());
        assert_eq!(ask("Why?", 0), pair("Why?", ""));
        assert_eq!(ask("Why?", 1), pair("<image>\nWhy?", "<image>"));
        assert_eq!(
            ask("See <image> here", 1),
            pair("See <image> here", "<image>")
        );
        assert_eq!(
            ask("See <image_00>", 1),
            pair("See <image_00>", "<image_00>")
        );
        assert_eq!(
            ask("Why?", 2),
            pair("<image_00>\n<image_01>\nWhy?", "<image_00> <image_01>")
        );
        assert_eq!(
            ask("<image_01> or <image_00>?", 2),
            pair("<image_01> or <image_00>?", "<image_00> <image_01>")
        );
    }
}
