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
        // How long the film went on after its last frame is unknown.
        Some(Clock::Seconds(times)) => even(times.iter().copied(), f64::INFINITY),
        Some(Clock::Rate(rate)) => at_rate(frames, *rate),
        None => at_rate(frames, DEFAULT_RATE),
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

fn at_rate(frames: usize, rate: f64) -> Vec<Vec<Option<u32>>> {
    let seconds = (0..frames).map(|frame| frame as f64 / rate);
    even(seconds, frames as f64 / rate)
}

fn even(seconds: impl ExactSizeIterator<Item = f64>, duration: f64) -> Vec<Vec<Option<u32>>> {
    let size = seconds.len().div_ceil(MAX_GROUPS).max(1);
    let tenths: Vec<Option<u32>> = seconds.map(|time| Some(tenths(time, duration))).collect();
    tenths.chunks(size).map(<[Option<u32>]>::to_vec).collect()
}

/// The nearest multiple of 0.1 s below `duration`, the lower one of two, in units of 0.1 s, truncated as the published
/// code does.
fn tenths(seconds: f64, duration: f64) -> u32 {
    let last = ((duration / 0.1).ceil() as u32).saturating_sub(1);
    let below = (seconds / 0.1) as u32;
    let near = below.saturating_sub(1)..=below.saturating_add(1);
    let distance = |tenths: &u32| (f64::from(*tenths) * 0.1 - seconds).abs();
    let nearest = near
        .filter(|tenths| *tenths <= last)
        .min_by(|a, b| distance(a).total_cmp(&distance(b)));
    (f64::from(nearest.unwrap_or(last)) * 0.1 / 0.1) as u32
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
        let at = |rate, frames| {
            let groups = groups(&video(frames, Some(Clock::Rate(rate)))).unwrap();
            groups.concat().into_iter().flatten().collect::<Vec<u32>>()
        };
        // 0.25 lies nearer to 0.2 than to the double above 0.3, and 0.75 nearer to the one above 0.7.
        assert_eq!(at(4.0, 4), [0, 2, 5, 7]);
        // 0.5 is no time of a film of half a second.
        assert_eq!(at(30.0, 15)[14], 4);
        let many = groups(&video(MAX_GROUPS + 1, Some(Clock::Rate(10.0)))).unwrap();
        assert_eq!((many.len(), many[0].len()), (91, 2));
        assert!(groups(&video(MAX_GROUPS * MAX_GROUP + 1, None)).is_err());
    }
}
