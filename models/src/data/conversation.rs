//! Checks and labels that the sample rules of several families share.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::LazyLock;

use regex::Regex;

use super::{EncodeOptions, IGNORED, RawSample, SampleError, SampleTokens, VIDEO};
use crate::image::{Decoded, ImageError, ImageSource, short_path};
use crate::text::literal::hide;
use crate::text::{Message, Tokenizer};

/// Roles besides user and assistant that a family's template writes. A system turn comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Roles {
    System,
    /// System, and what GLM-4 writes around calls of tools: metadata of answers, and turns of the role `observation`.
    SystemAndTools,
}

/// Fails unless `turns` are a conversation to train on.
///
/// # Errors
/// As [`check_roles`], and when the assistant never speaks.
pub(crate) fn check_turns(turns: &[Message], roles: Roles) -> Result<(), SampleError> {
    check_roles(turns, 2, roles)?;
    check_answers(turns)
}

/// Fails unless the assistant speaks and one of its turns is in the loss.
///
/// # Errors
/// [`SampleError::NoAssistantTurn`] or [`SampleError::NoSupervisedTurn`].
pub(crate) fn check_answers(turns: &[Message]) -> Result<(), SampleError> {
    let mut answers = turns.iter().filter(|turn| turn.role == "assistant");
    match (
        answers.clone().count(),
        answers.any(|turn| !turn.unsupervised),
    ) {
        (0, _) => Err(SampleError::NoAssistantTurn { turns: turns.len() }),
        (answers, false) => Err(SampleError::NoSupervisedTurn { answers }),
        _ => Ok(()),
    }
}

/// Fails unless `turns` are at least `needed` of user and assistant, the user's first; a system turn does not count.
///
/// # Errors
/// [`SampleError`] for the first turn that does not fit.
pub(crate) fn check_roles(
    turns: &[Message],
    needed: usize,
    roles: Roles,
) -> Result<(), SampleError> {
    let tools = roles == Roles::SystemAndTools;
    if !tools {
        check_metadata(turns)?;
    }
    let opens = turns.first().is_some_and(|turn| turn.role == "system");
    let first = usize::from(opens);
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
    let known = |turn: &Message| match turn.role.as_str() {
        "user" | "assistant" => true,
        role => role == "observation" && tools,
    };
    match spoken.iter().position(|turn| !known(turn)) {
        None => Ok(()),
        Some(turn) => Err(SampleError::UnknownRole {
            turn: first + turn,
            role: spoken[turn].role.clone(),
        }),
    }
}

/// Fails if a turn has metadata, which only the GLM-4 families write.
///
/// # Errors
/// [`SampleError::Metadata`].
pub(crate) fn check_metadata(turns: &[Message]) -> Result<(), SampleError> {
    match turns.iter().position(|turn| !turn.metadata.is_empty()) {
        None => Ok(()),
        Some(turn) => Err(SampleError::Metadata { turn }),
    }
}

/// What a family does with samples besides images and turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Abilities {
    /// It reads videos.
    pub(crate) videos: bool,
    /// Its template has a switch for thoughts.
    pub(crate) thinking: bool,
    /// It shows images in the user's first turn only.
    pub(crate) first_turn_only: bool,
}

static IMAGE_MARK: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"<image(_\d+)?>").expect("a constant pattern is valid"));

/// Fails if a sample asks for something that the family cannot do.
///
/// # Errors
/// [`SampleError::Video`], [`SampleError::Thinking`], [`SampleError::MisplacedImage`] or [`SampleError::LaterImage`].
pub(crate) fn check_abilities(sample: &RawSample, can: Abilities) -> Result<(), SampleError> {
    match (&sample.videos[..], sample.enable_thinking) {
        ([_, ..], _) if !can.videos => Err(SampleError::Video),
        (_, Some(_)) if !can.thinking => Err(SampleError::Thinking),
        _ => check_image_turns(sample, can.first_turn_only),
    }
}

/// Fails if the mark of an image or video stands in a turn that shows none.
fn check_image_turns(sample: &RawSample, first_turn_only: bool) -> Result<(), SampleError> {
    let (has_stills, has_videos) = (!sample.stills().is_empty(), !sample.videos.is_empty());
    let first = first_question(&sample.conversations);
    for (turn, message) in sample.conversations.iter().enumerate() {
        let shows = has_stills && IMAGE_MARK.is_match(&message.content);
        if !(shows || has_videos && message.content.contains(VIDEO)) {
            continue;
        }
        if matches!(message.role.as_str(), "assistant" | "system") {
            let role = message.role.clone();
            return Err(SampleError::MisplacedImage { turn, role });
        }
        if first_turn_only && turn != first {
            return Err(SampleError::LaterImage { turn });
        }
    }
    Ok(())
}

/// Index of the user's first turn, before which an image without a mark stands.
pub(crate) fn first_question(turns: &[Message]) -> usize {
    let first = turns.iter().position(|turn| turn.role == "user");
    first.unwrap_or(0)
}

/// `text` with each of `tokens` as plain text. The tokens that a user typed open or close no turn and stand for no image.
pub(crate) fn plain_text<'t>(text: &'t str, tokens: &[String]) -> Cow<'t, str> {
    hide(text, tokens)
}

/// Those of `texts` that are tokens of `tokenizer`.
pub(crate) fn control_tokens<'t>(
    tokenizer: &Tokenizer,
    texts: impl IntoIterator<Item = &'t str>,
) -> Vec<String> {
    let known = texts.into_iter().filter(|text| tokenizer.id(text).is_ok());
    known.map(str::to_owned).collect()
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

/// The switch for thoughts of a template that `has` one: the sample's, else the run's.
pub(crate) fn thinking_switch(
    sample: &RawSample,
    options: &EncodeOptions,
    has: bool,
) -> Option<bool> {
    let asked = sample.enable_thinking.or(options.enable_thinking);
    asked.filter(|_| has)
}

/// Width and height of an image of a sample, from its header.
///
/// # Errors
/// [`SampleError::Image`].
pub(crate) fn image_size(
    images: &dyn ImageSource,
    (name, path): &(String, PathBuf),
) -> Result<(usize, usize), SampleError> {
    let size = images.dimensions(path);
    size.map_err(|error| image_error(name, path, error))
}

/// Pixels of an image of a sample.
///
/// # Errors
/// [`SampleError::Image`].
pub(crate) fn image_pixels(
    images: &dyn ImageSource,
    (name, path): &(String, PathBuf),
) -> Result<Decoded, SampleError> {
    let image = images.load(path);
    image.map_err(|error| image_error(name, path, error))
}

/// A conversation as tokens, before it is cut and its labels are shifted.
#[derive(Default)]
pub(crate) struct Written {
    pub(crate) input_ids: Vec<i32>,
    /// Label of each token itself.
    pub(crate) own_labels: Vec<i32>,
    /// Token range of each image.
    pub(crate) bounds: Vec<(usize, usize)>,
}

impl Written {
    pub(crate) fn push(&mut self, ids: &[i32], supervised: bool) {
        self.input_ids.extend(ids);
        match supervised {
            true => self.own_labels.extend(ids),
            false => self.own_labels.resize(self.input_ids.len(), IGNORED),
        }
    }

    /// The first `kept` tokens and `images` images, each of one slice, with shifted labels.
    ///
    /// # Errors
    /// [`SampleError::NoSupervisedToken`].
    pub(crate) fn cut(mut self, kept: usize, images: usize) -> Result<SampleTokens, SampleError> {
        let tokens = self.input_ids.len();
        let answer_start = self.own_labels.iter().position(|label| *label != IGNORED);
        self.input_ids.truncate(kept);
        self.own_labels.truncate(kept);
        self.bounds.truncate(images);
        let labels = shifted(&self.own_labels);
        if supervised(&labels) == 0 {
            return Err(SampleError::NoSupervisedToken {
                tokens,
                kept,
                answer_start,
            });
        }
        Ok(SampleTokens {
            slices: self.bounds.len(),
            input_ids: self.input_ids,
            labels,
            image_bounds: self.bounds,
            untruncated_tokens: tokens,
        })
    }
}

/// An image that cannot be read.
fn image_error(name: &str, path: &std::path::Path, source: ImageError) -> SampleError {
    SampleError::Image {
        name: name.to_owned(),
        path: short_path(path),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(roles: &[&str]) -> Vec<Message> {
        let turn = |role: &&str| Message::new(*role, "");
        roles.iter().map(turn).collect()
    }

    #[test]
    fn a_system_turn_comes_first_and_tools_are_known_where_the_template_writes_them() {
        assert!(check_turns(&turns(&["system", "user", "assistant"]), Roles::System).is_ok());
        let late = check_turns(&turns(&["user", "assistant", "system"]), Roles::System);
        assert!(matches!(
            late,
            Err(SampleError::UnknownRole { turn: 2, .. })
        ));
        let alone = check_turns(&turns(&["system", "user"]), Roles::System);
        assert!(matches!(
            alone,
            Err(SampleError::TooFewTurns { turns: 1, .. })
        ));
        let mut called = turns(&["user", "assistant", "observation", "assistant"]);
        assert!(check_turns(&called, Roles::SystemAndTools).is_ok());
        let unknown = check_turns(&called, Roles::System);
        assert!(matches!(
            unknown,
            Err(SampleError::UnknownRole { turn: 2, .. })
        ));
        called[1].metadata = "f".to_owned();
        let unknown = check_turns(&called, Roles::System);
        assert!(matches!(unknown, Err(SampleError::Metadata { turn: 1 })));
    }

    #[test]
    fn a_conversation_without_an_answer_in_the_loss_is_refused() {
        let mut all = turns(&["user", "assistant", "user", "assistant"]);
        all[1].unsupervised = true;
        assert!(check_turns(&all, Roles::System).is_ok());
        all[3].unsupervised = true;
        let none = check_turns(&all, Roles::System);
        assert!(matches!(
            none,
            Err(SampleError::NoSupervisedTurn { answers: 2 })
        ));
    }

    #[test]
    fn images_stand_in_turns_that_the_model_sees() {
        let marked = |at: usize, mark: &str| {
            let roles = ["system", "user", "assistant", "user", "observation"];
            let mut conversations = turns(&roles);
            conversations[at].content = format!("a {mark} b");
            RawSample {
                images: vec![("<image_00>".to_owned(), PathBuf::from("a.png"))],
                conversations,
                ..RawSample::default()
            }
        };
        let anywhere = Abilities::default();
        let first_turn_only = Abilities {
            first_turn_only: true,
            ..anywhere
        };
        for mark in ["<image>", "<image_00>"] {
            for at in [0, 2] {
                let error = check_abilities(&marked(at, mark), anywhere).unwrap_err();
                let found = matches!(error, SampleError::MisplacedImage { turn, .. } if turn == at);
                assert!(found, "{at}: {error}");
                let mut without = marked(at, mark);
                without.images.clear();
                assert!(check_abilities(&without, first_turn_only).is_ok(), "{at}");
            }
            for at in [1, 3, 4] {
                assert!(check_abilities(&marked(at, mark), anywhere).is_ok(), "{at}");
                let later = check_abilities(&marked(at, mark), first_turn_only);
                let refused = matches!(later, Err(SampleError::LaterImage { turn }) if turn == at);
                assert_eq!(refused, at != 1, "{at}: {later:?}");
            }
        }
        let plain = marked(2, &crate::text::literal::hidden("<image>"));
        assert!(check_abilities(&plain, first_turn_only).is_ok());
    }

    #[test]
    fn labels_are_shifted_by_one() {
        assert_eq!(shifted(&[IGNORED, 4, 5]), [4, 5, IGNORED]);
        assert!(shifted(&[]).is_empty());
    }
}
