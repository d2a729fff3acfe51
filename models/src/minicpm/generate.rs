//! Greedy decoding by full recomputation, in lock step with other ranks.

use crate::autograd::Tape;
use crate::error::Result;
use crate::{SampleInput, VisionLanguageModel};
use engine::ParamAccess;

/// How far to decode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GenerateOptions {
    /// Most tokens per prompt.
    pub max_new_tokens: usize,
    /// The token that ends an answer; it is not part of it.
    pub eos_id: i32,
}

/// Continues every prompt with the most likely token (the lowest id of equals) until its end
/// token, and returns the new tokens.
///
/// Ranks that share the model's parameters run the same number of passes: before each,
/// `anyone_left` is told whether this rank still decodes and answers whether any rank does. A rank
/// that is done, or has no prompt, repeats a pass of one token meanwhile.
///
/// # Errors
/// When a prompt does not fit the model, the engine or the device fails, or `anyone_left` does.
pub fn generate(
    model: &dyn VisionLanguageModel,
    access: &dyn ParamAccess,
    prompts: &[SampleInput<'_>],
    options: GenerateOptions,
    anyone_left: &mut dyn FnMut(bool) -> Result<bool>,
) -> Result<Vec<Vec<i32>>> {
    let mut texts: Vec<Vec<i32>> = prompts.iter().map(|p| p.input_ids.to_vec()).collect();
    let mut open: Vec<usize> = (0..prompts.len()).collect();
    for _ in 0..options.max_new_tokens {
        if !anyone_left(!open.is_empty())? {
            break;
        }
        let next = next_tokens(model, access, prompts, &texts, &open, options.eos_id)?;
        let mut still = Vec::with_capacity(open.len());
        for (i, token) in open.into_iter().zip(next) {
            if token != options.eos_id {
                texts[i].push(token);
                still.push(i);
            }
        }
        open = still;
    }
    let answer =
        |(text, prompt): (Vec<i32>, &SampleInput<'_>)| text[prompt.input_ids.len()..].to_vec();
    Ok(texts.into_iter().zip(prompts).map(answer).collect())
}

/// The next token of each open prompt.
fn next_tokens(
    model: &dyn VisionLanguageModel,
    access: &dyn ParamAccess,
    prompts: &[SampleInput<'_>],
    texts: &[Vec<i32>],
    open: &[usize],
    filler: i32,
) -> Result<Vec<i32>> {
    let filler = [filler];
    let mut inputs: Vec<SampleInput<'_>> = open
        .iter()
        .map(|i| SampleInput {
            input_ids: &texts[*i],
            labels: &[],
            ..prompts[*i]
        })
        .collect();
    if inputs.is_empty() {
        inputs.push(SampleInput {
            input_ids: &filler,
            labels: &[],
            image_bounds: &[],
            slices: &[],
        });
    }
    let batch = model.collate(&inputs, &**access.backend())?;
    let tape = Tape::inference(access);
    let logits = model.next_token_logits(&tape, &batch)?;
    let vocab = logits.shape().last();
    let rows = logits.to_f32_vec()?;
    let best = rows.chunks_exact(vocab).map(|row| argmax(row) as i32);
    Ok(best.take(open.len()).collect())
}

/// Index of the largest value, the first of equals.
fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::argmax;

    #[test]
    fn the_first_of_equal_values_wins() {
        assert_eq!(argmax(&[-1.0, 3.0, 2.0, 3.0]), 1);
    }
}
