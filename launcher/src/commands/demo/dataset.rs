//! Samples of the demo: an image, a question in one of several phrasings, the name of a color.

use serde_json::Value;

use super::image::{self, COLOURS};
use super::rng::Rng;
use crate::commands::synth::writer;

/// Number of training samples that the demo generates.
pub const TRAIN_SAMPLES: usize = 2000;
/// Number of held-out samples of the demo, which are used for evaluation only. Each color is the answer
/// equally often.
pub const HELD_OUT_SAMPLES: usize = 96;

const TRAIN_SEED: u64 = 1;
const HELD_OUT_SEED: u64 = 2;

/// Phrasings of the question about the color of the shape. Each sample uses one of them.
pub(super) const QUESTIONS: [&str; 4] = [
    "What colour is the shape?",
    "Which colour does the shape have?",
    "Name the colour of the shape.",
    "What is the colour of this shape?",
];

/// One sample of the demo. It stores the seed and the choices; the image is drawn from them by `png`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    seed: u64,
    index: usize,
    colour: usize,
    question: usize,
}

pub(super) fn train() -> impl Iterator<Item = Sample> {
    samples(TRAIN_SEED, TRAIN_SAMPLES)
}

pub(super) fn held_out() -> impl Iterator<Item = Sample> {
    samples(HELD_OUT_SEED, HELD_OUT_SAMPLES)
}

fn samples(seed: u64, count: usize) -> impl Iterator<Item = Sample> {
    (0..count).map(move |index| Sample {
        seed,
        index,
        colour: index % COLOURS.len(),
        // A separate random stream, so the wording says nothing about the image.
        question: Rng::new(seed ^ 0x5175, index as u64).below(QUESTIONS.len() as u32) as usize,
    })
}

impl Sample {
    pub(super) fn png(&self) -> Vec<u8> {
        image::draw(self.colour, &mut Rng::new(self.seed, self.index as u64))
    }

    /// The sample in MiniCPM's format, with its image in `directory`.
    pub(super) fn to_json(self, directory: &str) -> Value {
        let (question, answer) = (QUESTIONS[self.question], COLOURS[self.colour].0);
        writer::sample(directory, self.index, question, answer)
    }
}

/// All texts that occur in the demo's samples and prompts, on which the BPE merges of its tokenizer are trained.
pub(super) fn corpus() -> Vec<String> {
    let mut texts: Vec<String> = [
        "system",
        "You are a helpful assistant.",
        "user",
        "assistant",
    ]
    .map(str::to_string)
    .to_vec();
    texts.extend(QUESTIONS.map(str::to_string));
    texts.extend(COLOURS.map(|(name, _)| name.to_string()));
    texts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_out_images_are_not_in_the_training_set() {
        let train: std::collections::HashSet<Vec<u8>> =
            train().map(|sample| sample.png()).collect();
        assert!(
            train.len() > TRAIN_SAMPLES - 20,
            "{} different pictures",
            train.len()
        );
        assert!(held_out().all(|sample| !train.contains(&sample.png())));
    }

    #[test]
    fn colors_are_balanced_and_questions_vary() {
        let mut colours = [0; 8];
        let mut questions = [0; 4];
        for sample in held_out() {
            colours[sample.colour] += 1;
            questions[sample.question] += 1;
        }
        assert_eq!(colours, [12; 8]);
        assert!(questions.iter().all(|&count| count > 10), "{questions:?}");
    }

    #[test]
    fn samples_are_in_minicpms_format() {
        let sample = held_out().nth(9).expect("a sample").to_json("heldout");
        assert_eq!(sample["image"], "heldout/0009.png");
        assert_eq!(sample["conversations"][1]["content"], "green");
    }
}
