//! Checks and labels that the sample rules of several families share.

use std::path::Path;

use super::{IGNORED, RawSample, SampleError};
use crate::image::ImageError;
use crate::text::Message;

/// Whether a conversation may open with a system turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SystemTurn {
    Allowed,
    Refused,
}

/// Fails unless `turns` are a conversation to train on.
///
/// # Errors
/// As [`check_roles`], and when the assistant never speaks.
pub(crate) fn check_turns(turns: &[Message], system: SystemTurn) -> Result<(), SampleError> {
    check_roles(turns, 2, system)?;
    if turns.iter().all(|turn| turn.role != "assistant") {
        return Err(SampleError::NoAssistantTurn { turns: turns.len() });
    }
    Ok(())
}

/// Fails unless `turns` are at least `needed` of user and assistant, the user's first; a system turn does not count.
///
/// # Errors
/// [`SampleError`] for the first turn that does not fit.
pub(crate) fn check_roles(
    turns: &[Message],
    needed: usize,
    system: SystemTurn,
) -> Result<(), SampleError> {
    let opens = turns.first().is_some_and(|turn| turn.role == "system");
    let first = usize::from(opens && system == SystemTurn::Allowed);
    let spoken = &turns[first..];
    if spoken.len() < needed {
        return Err(SampleError::TooFewTurns {
            turns: spoken.len(),
            needed,
        });
    }
    if spoken[0].role != "user" {
        return Err(SampleError::FirstRoleNotUser {
            role: spoken[0].role.clone(),
        });
    }
    let known = |turn: &Message| matches!(turn.role.as_str(), "user" | "assistant");
    match spoken.iter().position(|turn| !known(turn)) {
        None => Ok(()),
        Some(turn) => Err(SampleError::UnknownRole {
            turn: first + turn,
            role: spoken[turn].role.clone(),
        }),
    }
}

/// The turns of a sample without its last answer.
pub(crate) fn question(sample: &RawSample) -> &[Message] {
    let answered = usize::from(sample.answer().is_some());
    &sample.conversations[..sample.conversations.len() - answered]
}

/// Fails if a token has no row in an embedding of `vocab_size` rows.
///
/// # Errors
/// [`SampleError::TokenOutOfRange`].
pub(crate) fn check_vocabulary(ids: &[i32], vocab_size: usize) -> Result<(), SampleError> {
    match ids.iter().position(|&id| id as usize >= vocab_size) {
        None => Ok(()),
        Some(position) => Err(SampleError::TokenOutOfRange {
            id: ids[position],
            position,
            vocab_size,
        }),
    }
}

/// Labels shifted by one: of the next position, from those of the positions themselves.
pub(crate) fn shifted(own: &[i32]) -> Vec<i32> {
    let mut labels = own.get(1..).unwrap_or_default().to_vec();
    labels.resize(own.len(), IGNORED);
    labels
}

/// Number of positions whose label is not ignored, which are those that enter the loss.
pub(crate) fn supervised(labels: &[i32]) -> usize {
    labels.iter().filter(|&&label| label != IGNORED).count()
}

/// An image that cannot be read.
pub(crate) fn image_error(name: &str, path: &Path, source: ImageError) -> SampleError {
    SampleError::Image {
        name: name.to_owned(),
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(roles: &[&str]) -> Vec<Message> {
        let turn = |role: &&str| Message {
            role: (*role).to_owned(),
            content: String::new(),
        };
        roles.iter().map(turn).collect()
    }

    #[test]
    fn a_system_turn_may_come_first_where_it_is_allowed() {
        let all = turns(&["system", "user", "assistant"]);
        assert!(check_turns(&all, SystemTurn::Allowed).is_ok());
        let refused = check_turns(&all, SystemTurn::Refused).unwrap_err();
        assert!(matches!(refused, SampleError::FirstRoleNotUser { .. }));
        let late = check_turns(
            &turns(&["user", "assistant", "system"]),
            SystemTurn::Allowed,
        );
        assert!(matches!(
            late,
            Err(SampleError::UnknownRole { turn: 2, .. })
        ));
        let alone = check_turns(&turns(&["system", "user"]), SystemTurn::Allowed);
        assert!(matches!(
            alone,
            Err(SampleError::TooFewTurns { turns: 1, .. })
        ));
    }

    #[test]
    fn labels_are_shifted_by_one() {
        assert_eq!(shifted(&[IGNORED, 4, 5]), [4, 5, IGNORED]);
        assert!(shifted(&[]).is_empty());
    }
}
