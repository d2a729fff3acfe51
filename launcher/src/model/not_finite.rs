//! The first value of a forward pass that is not finite, for reports.

use crate::error::{Failure, failures};
use crate::lang::{Text, both, text};
use engine::{ModelSpec, ParamId};
use kernels::Tensor;
use models::ModelError;
use models::autograd::OpObserver;
use models::data::RawSample;
use std::cell::{Cell, RefCell};

/// Runs a forward pass of a model of `spec` and describes the first operation with a non-finite result; `None` if all are
/// finite. `pass` hands the observer to its tape. `unit` names the unit of an operation without parameters, if known.
pub(crate) fn first_not_finite(
    spec: &ModelSpec,
    unit: &dyn Fn() -> Option<String>,
    pass: &dyn Fn(OpObserver<'_>) -> Result<(), ModelError>,
) -> Result<Option<Text>, ModelError> {
    let found = RefCell::new(None);
    let largest = Cell::new(None::<f32>);
    let watch = |op: &'static str, params: &[ParamId], value: &Tensor| {
        if found.borrow().is_some() {
            return;
        }
        let Ok(values) = value.to_f32_vec() else {
            return;
        };
        if values.iter().all(|x| x.is_finite()) {
            let most = values.iter().fold(0f32, |most, x| most.max(x.abs()));
            largest.set(Some(most));
            return;
        }
        let with = match (params.first(), unit()) {
            (Some(id), _) => text!(" with {}", "，使用 {}", spec.params[id.index()].name),
            (None, Some(unit)) => text!(" in {unit}", "，位于 {unit}"),
            (None, None) => Text::default(),
        };
        let before = match largest.get() {
            Some(largest) => text!(
                "max |x| before it {largest:.1e}",
                "其前 max |x| 为 {largest:.1e}"
            ),
            None => both(
                "it is the first operation: its weights are not finite",
                "它是第一个运算：其权重不是有限值",
            )
            .into(),
        };
        *found.borrow_mut() = Some(text!(
            "output of {op}{with}, {}, {before}",
            "{op} 的输出{with}，{}，{before}",
            value.dtype()
        ));
    };
    pass(&watch)?;
    Ok(found.into_inner())
}

/// Failure of an evaluation in which the loss of a sample is not finite; `first` describes the first such value.
pub(crate) fn not_finite_loss(
    sample: &RawSample,
    index: usize,
    loss: f64,
    first: Option<Text>,
) -> Failure {
    let first = first.unwrap_or_else(|| both("the loss itself", "损失本身").into());
    let id = sample.id.as_ref();
    let id = id.map_or_else(String::new, |id| format!(" (id {id})"));
    failures::not_finite(
        text!(
            "the loss of evaluation sample {index}{id} is {loss}",
            "评估样本 {index}{id} 的损失为 {loss}"
        ),
        text!("first non-finite value: {first}", "第一个非有限值：{first}"),
    )
}
