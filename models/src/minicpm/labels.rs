//! Supervised tokens of a conversation, and the shifted labels.

use super::processor::MarkerIds;
use crate::data::IGNORED;
use crate::text::Message;

/// Flags every token of an answer, from after the role's line to the end of the turn, inclusive. `turns` are the turns
/// that the template wrote as `ids`. Their texts hold no marker, so the n-th start marker of an assistant opens its n-th
/// turn. The first `empty_block` tokens of the last answer are left out, as the published script does: it takes the
/// last token `assistant` for that of the last answer, so an answer with that word keeps its block.
pub(super) fn answer_spans(
    ids: &[i32],
    turns: &[Message],
    markers: &MarkerIds,
    empty_block: usize,
) -> Vec<bool> {
    let last = ids.iter().rposition(|id| *id == markers.assistant);
    let mut trainable = vec![false; ids.len()];
    let mut answers = turns.iter().filter(|turn| turn.role == "assistant");
    for role in 1..ids.len() {
        if ids[role] != markers.assistant || ids[role - 1] != markers.turn_start {
            continue;
        }
        let supervised = answers.next().is_some_and(|turn| !turn.unsupervised);
        // behind the role comes a line break
        let block = if Some(role) == last { empty_block } else { 0 };
        let start = role + 2 + block;
        let end = (start..ids.len()).find(|&i| ids[i] == markers.turn_end);
        if let (true, Some(end)) = (supervised, end) {
            trainable[start..=end].fill(true);
        }
    }
    trainable
}

/// Label of each position, which is the next token; after the last token of an answer it is `eos`.
pub(super) fn shifted_labels(ids: &[i32], trainable: &[bool], eos: i32) -> Vec<i32> {
    let mut labels = vec![IGNORED; ids.len()];
    for i in 1..ids.len() {
        if trainable[i] {
            labels[i - 1] = ids[i];
        } else if trainable[i - 1] {
            labels[i - 1] = eos;
        }
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARKERS: MarkerIds = MarkerIds {
        turn_start: 1,
        turn_end: 2,
        assistant: 3,
        eos: 2,
        image_start: 4,
        image_end: 5,
        slice_start: 6,
        slice_end: 7,
    };

    fn spans(ids: &[i32]) -> Vec<usize> {
        spans_of(ids, &[false; 3])
    }

    fn spans_of(ids: &[i32], unsupervised: &[bool]) -> Vec<usize> {
        let answer = |&unsupervised| Message {
            unsupervised,
            ..Message::new("assistant", "")
        };
        let turns: Vec<Message> = unsupervised.iter().map(answer).collect();
        let flags = answer_spans(ids, &turns, &MARKERS, 0);
        (0..ids.len()).filter(|&i| flags[i]).collect()
    }

    #[test]
    fn an_answer_starts_after_the_line_break_and_includes_its_end_token() {
        assert_eq!(spans(&[1, 9, 2, 1, 3, 10, 20, 21, 2, 10]), [6, 7, 8]);
    }

    #[test]
    fn the_word_assistant_in_text_starts_no_answer() {
        assert!(spans(&[9, 3, 10, 20, 2]).is_empty());
        assert!(spans(&[1, 3]).is_empty());
        assert!(spans(&[1, 3, 10, 20]).is_empty(), "no end token");
    }

    #[test]
    fn an_empty_answer_ends_at_its_own_end_token() {
        let ids = [1, 3, 10, 2, 10, 1, 9, 10, 20, 2];
        assert_eq!(spans(&ids), [3]);
    }

    #[test]
    fn an_answer_out_of_the_loss_is_left_out() {
        let ids = [1, 3, 10, 20, 2, 10, 1, 3, 10, 21, 2];
        assert_eq!(spans_of(&ids, &[true, false]), [9, 10]);
        assert_eq!(spans_of(&ids, &[false, true]), [3, 4]);
        assert_eq!(
            spans_of(&ids, &[false]),
            [3, 4],
            "a turn of the template's own"
        );
    }

    #[test]
    fn the_empty_thought_of_the_last_answer_is_left_out() {
        let turns = [Message::new("assistant", ""), Message::new("assistant", "")];
        let spans = |ids: &[i32]| -> Vec<usize> {
            let flags = answer_spans(ids, &turns, &MARKERS, 2);
            (0..ids.len()).filter(|&i| flags[i]).collect()
        };
        let ids = [1, 3, 10, 20, 2, 10, 1, 3, 10, 50, 51, 21, 2];
        assert_eq!(spans(&ids), [3, 4, 11, 12]);
        // The word in the answer hides its role's token from the script.
        let ids = [1, 3, 10, 20, 2, 10, 1, 3, 10, 50, 51, 3, 2];
        assert_eq!(spans(&ids), [3, 4, 9, 10, 11, 12]);
    }

    #[test]
    fn labels_are_shifted_and_end_with_eos_once_more() {
        let ids = [10, 20, 2, 10, 30];
        let labels = shifted_labels(&ids, &[false, true, true, false, false], 99);
        assert_eq!(labels, [20, 2, 99, IGNORED, IGNORED]);
        // cut right behind the answer there is nothing left to predict
        assert_eq!(
            shifted_labels(&ids[..3], &[false, true, true], 99),
            [20, 2, IGNORED]
        );
        assert!(shifted_labels(&[], &[], 99).is_empty());
    }
}
