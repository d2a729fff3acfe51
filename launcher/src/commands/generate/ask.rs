//! `launcher generate`: one prompt, one answer.

use super::model::{OpenModel, positive, required};
use super::note;
use super::ranks::{Asking, Largest, Outcome};
use crate::cli::{Args, GenerateArgs};
use crate::config::ExifRotation;
use crate::data::check::encode_options;
use crate::data::problems;
use crate::error::output::print;
use crate::error::{ErrorCode, Failure, chain};
use crate::lang::{Text, both, text};
use crate::memory;
use crate::rank_env::RankEnv;
use crate::train::evaluate::decode;
use crate::train::replica::Replica;
use crate::ui::{Event, Reporter};
use crate::units::{bytes as format_bytes, seconds as format_seconds};
use models::SampleInput;
use models::data::SINGLE_IMAGE;
use models::data::{EncodeOptions, EncodedPrompt, PlaceholderStyle, RawSample, SampleError};
use models::generate::{GenerateOptions, Prompt, Sampling, cache_bytes};
use models::image::ImageFolder;
use models::places;
use models::text::Message;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

const DEFAULT_NEW_TOKENS: usize = 256;
const DEFAULT_PROMPT_TOKENS: usize = 8192;
const DEFAULT_SLICES: usize = 9;
const DEFAULT_SEED: u64 = 42;

/// Prints the answer to the prompt of `args` on standard output as its tokens come, and times on standard error.
///
/// # Errors
/// Invalid flags; a model, adapter or image that cannot be used; a prompt that is too long.
pub(crate) fn run(args: &GenerateArgs, asking: &mut Asking<'_>) -> Result<ExitCode, Failure> {
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
    if asking.is_first() && sampling.temperature == 0.0 {
        let unused = [
            ("--top-p", args.top_p.is_some()),
            ("--top-k", args.top_k.is_some()),
            ("--seed", args.seed.is_some()),
        ];
        for (flag, _) in unused.into_iter().filter(|(_, given)| *given) {
            note(text!(
                "note    {flag} has no effect: without --temperature the likeliest token is taken",
                "提示    {flag} 不起作用：未给出 --temperature 时总是取概率最大的词元"
            ));
        }
    }
    let open = OpenModel::open(dir, args.adapter.as_deref(), args.precision)?;
    if let (true, Some(line)) = (asking.is_first(), open.unused_settings()) {
        note(line);
    }
    let more = Args {
        model_max_length: Some(longest),
        max_slice_nums: Some(positive(slices, "--max-slice-nums")?),
        template: args.template,
        exif_rotation: args.exif_rotation,
        ..Args::default()
    };
    let run = asking.plan(&open, &args.ranks, more, (PathBuf::new(), None))?;
    let options = EncodeOptions {
        enable_thinking: args.enable_thinking,
        ..encode_options(&run)
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
    let largest = Largest {
        longest: &[],
        prompts: vec![asked],
        image_bytes: args.image.is_empty().then_some(0),
    };
    let is_json = args.json == Some(true);
    let outcome = asking.answer(&open, &run, &largest, &|replica, rank| {
        answer(replica, rank, asked, sampling, !is_json)
    })?;
    let record = match outcome {
        Outcome::Found(record) => record,
        Outcome::Rank(code) => return Ok(code),
    };
    if !is_json {
        // Reports a standard output that lost the answer.
        return print("");
    }
    print(&format!("{record:#}\n"))
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
        .processor()
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

/// Answers the prompt on rank 0. The others take part in its passes. With `streams`, the answer is shown as it grows.
fn answer(
    replica: &Replica<'_>,
    rank: &RankEnv,
    prompt: Prompt<'_>,
    sampling: Sampling,
    streams: bool,
) -> Result<Value, Failure> {
    let options = GenerateOptions {
        sampling,
        stop_ids: replica.processor.stop_ids(),
        mlp_tiles: replica.config.mlp_tile_tokens,
    };
    let prompts = if replica.data().rank == 0 {
        vec![prompt]
    } else {
        vec![]
    };
    let text_of = |tokens: &[i32]| {
        let text = replica.processor.decode(tokens);
        text.map_err(|e| refuse(&SampleError::from(e)))
    };
    let reporter = Reporter::for_rank(rank);
    let say = |text: String| {
        if streams && !text.is_empty() {
            reporter.emit(&Event::Answer { text });
        }
    };
    let mut spoken = Spoken::default();
    let started = Instant::now();
    // Seconds at the end of each pass. The first one is the prompt's.
    let mut ends = Vec::new();
    let mut answers = decode(replica, &prompts, &options, &mut |answers| {
        ends.push(started.elapsed().as_secs_f64());
        if let Some(Ok(text)) = answers.first().map(|tokens| text_of(tokens)) {
            say(spoken.more(&text));
        }
    })?;
    let tokens = answers.pop().unwrap_or_default();
    let text = text_of(&tokens)?;
    say(spoken.rest(&text));
    let prefill_seconds = ends.first().copied().unwrap_or_default();
    let answered = Answered {
        text: text.trim().to_owned(),
        tokens: tokens.len(),
        passes: ends.len().saturating_sub(1),
        prefill_seconds,
        decode_seconds: ends.last().copied().unwrap_or_default() - prefill_seconds,
    };
    let prompt_tokens = prompt.input.input_ids.len();
    if rank.rank == 0 {
        if streams {
            say("\n".to_owned());
        }
        let cache = cache_bytes(replica.model.cache_shape(), &[prompt]);
        note(answered.times(prompt_tokens, cache));
    }
    let is_cut = answered.tokens == prompt.max_new_tokens;
    Ok(json!({
        "answer": answered.text,
        "tokens": answered.tokens,
        "stopped_by": if is_cut { "length" } else { "end" },
        "prompt_tokens": prompt_tokens,
        "slices": prompt.input.slices.len(),
        "prefill_seconds": answered.prefill_seconds,
        "decode_seconds": answered.decode_seconds,
    }))
}

/// The part of a growing answer that was shown.
#[derive(Default)]
struct Spoken(String);

impl Spoken {
    /// What can be shown of `text` so far. White space waits for what follows it, and so do the first bytes of a
    /// character.
    fn more(&mut self, text: &str) -> String {
        let sure = text.trim_end_matches(char::REPLACEMENT_CHARACTER).trim();
        let Some(new) = sure.strip_prefix(&*self.0).map(str::to_owned) else {
            return String::new();
        };
        self.0.push_str(&new);
        new
    }

    /// What is missing of the complete answer. An answer whose beginning became another is repeated on a new line.
    fn rest(&mut self, text: &str) -> String {
        let text = text.trim();
        match text.strip_prefix(&*self.0) {
            Some(new) => new.to_owned(),
            None => format!("\n{text}"),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_growing_answer_is_shown_once_and_whole() {
        let grown = [
            " ",
            " It",
            " It is ",
            " It is \u{fffd}",
            " It is é",
            " It is é \n",
        ];
        let mut spoken = Spoken::default();
        let shown: Vec<String> = grown.iter().map(|text| spoken.more(text)).collect();
        assert_eq!(shown, ["", "It", " is", "", " é", ""]);
        assert_eq!(spoken.rest(" It is é. "), ".");
        assert_eq!(spoken.rest("Other"), "\nOther");
    }

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
