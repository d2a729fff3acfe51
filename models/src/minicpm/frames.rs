//! Frames of a video in groups: each group becomes one block of features per slice position.

use crate::data::{Clock, RawVideo};

/// Most frames of a group.
pub(crate) const MAX_GROUP: usize = 6;
/// Most groups of a video.
pub(crate) const MAX_GROUPS: usize = 180;
/// Frames per second of a video whose data does not say.
const DEFAULT_RATE: f64 = 3.0;

/// Times of a video's frames in tenths of seconds, by group.
///
/// Groups are those of the data; without them frames are grouped evenly, as few in a group as [`MAX_GROUPS`] allows.
///
/// # Errors
/// The groups do not fit the frames, or are too large or too many.
pub(super) fn groups(video: &RawVideo) -> Result<Vec<Vec<Option<u32>>>, String> {
    let frames = video.frames.len();
    let groups = match &video.clock {
        Some(Clock::Groups(groups)) => groups.clone(),
        Some(Clock::Seconds(times)) => even(times.iter().copied()),
        Some(Clock::Rate(rate)) => even((0..frames).map(|frame| frame as f64 / rate)),
        None => even((0..frames).map(|frame| frame as f64 / DEFAULT_RATE)),
    };
    let stamped: usize = groups.iter().map(Vec::len).sum();
    if stamped != frames || frames == 0 {
        return Err(format!("{stamped} times for {frames} frames"));
    }
    if groups.len() > MAX_GROUPS {
        let count = groups.len();
        return Err(format!(
            "{count} groups of frames, at most {MAX_GROUPS} are taken"
        ));
    }
    match groups
        .iter()
        .map(Vec::len)
        .find(|len| !(1..=MAX_GROUP).contains(len))
    {
        None => Ok(groups),
        Some(len) => Err(format!(
            "a group of {len} frames, 1 to {MAX_GROUP} are possible"
        )),
    }
}

fn even(seconds: impl ExactSizeIterator<Item = f64>) -> Vec<Vec<Option<u32>>> {
    let size = seconds.len().div_ceil(MAX_GROUPS).max(1);
    let tenths: Vec<Option<u32>> = seconds.map(|time| Some(tenths(time))).collect();
    tenths.chunks(size).map(<[Option<u32>]>::to_vec).collect()
}

/// The nearest multiple of 0.1 s in units of 0.1 s, truncated as the published code does.
fn tenths(seconds: f64) -> u32 {
    let nearest = (seconds / 0.1).round() * 0.1;
    (nearest / 0.1) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn video(frames: usize, clock: Option<Clock>) -> RawVideo {
        RawVideo {
            frames: 0..frames,
            clock,
        }
    }

    #[test]
    fn groups_are_bounded_and_fit_the_frames() {
        let given = |groups: Vec<Vec<Option<u32>>>, frames| {
            let clock = Some(Clock::Groups(groups));
            super::groups(&video(frames, clock))
        };
        let fits = vec![vec![Some(0), None], vec![Some(8)]];
        assert_eq!(given(fits.clone(), 3).unwrap(), fits);
        assert!(given(fits, 4).is_err());
        assert!(given(vec![vec![None; 7]], 7).is_err());
        assert!(given(vec![Vec::new(), vec![None]], 1).is_err());
        assert!(groups(&video(0, None)).is_err());
    }

    #[test]
    fn frames_without_groups_share_as_little_as_possible() {
        let seconds = Some(Clock::Seconds(vec![0.0, 0.5, 4.3]));
        assert_eq!(
            groups(&video(3, seconds)).unwrap(),
            [[Some(0)], [Some(5)], [Some(42)]]
        );
        let many = groups(&video(MAX_GROUPS + 1, Some(Clock::Rate(10.0)))).unwrap();
        assert_eq!((many.len(), many[0].len()), (91, 2));
        assert!(groups(&video(MAX_GROUPS * MAX_GROUP + 1, None)).is_err());
    }
}
