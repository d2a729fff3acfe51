//! Element-wise operations on long slices, spread over the rayon pool: one thread cannot use the full memory
//! bandwidth.

use rayon::prelude::*;

/// Elements per rayon task.
const TASK_ELEMS: usize = 1 << 17;

/// Copies `values` to `out` in parallel.
pub(crate) fn copy<T: Copy + Send + Sync>(values: &[T], out: &mut [T]) {
    for_each(values, out, |values, out| out.copy_from_slice(values));
}

/// Adds `values` to `out` in parallel, element by element.
pub(crate) fn add(values: &[f32], out: &mut [f32]) {
    for_each(values, out, |values, out| {
        for (sum, v) in out.iter_mut().zip(values) {
            *sum += v;
        }
    });
}

fn for_each<T: Copy + Send + Sync>(
    values: &[T],
    out: &mut [T],
    pass: impl Fn(&[T], &mut [T]) + Sync,
) {
    assert_eq!(values.len(), out.len(), "as many values as places");
    if out.len() <= TASK_ELEMS {
        return pass(values, out);
    }
    out.par_chunks_mut(TASK_ELEMS)
        .zip(values.par_chunks(TASK_ELEMS))
        .for_each(|(out, values)| pass(values, out));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_copied_and_added_once() {
        for len in [0, 1, TASK_ELEMS, TASK_ELEMS + 1, 3 * TASK_ELEMS + 5] {
            let values: Vec<f32> = (0..len).map(|i| (i % 1009) as f32).collect();
            let mut out = vec![f32::NAN; len];
            copy(&values, &mut out);
            assert_eq!(out, values);
            add(&values, &mut out);
            assert!(out.iter().zip(&values).all(|(o, v)| *o == 2.0 * v), "{len}");
        }
    }
}
