//! cuBLASLt on one GPU. Descriptors and the algorithm are created once per [`Shape`] and stored. A product allocates
//! nothing on the device; its workspace is an argument.
#![expect(unsafe_code, reason = "calls into cuBLASLt, which was found before")]

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t, cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cudaDataType_t,
};

use super::{ALIGNMENT, Epilogue, Multiply, Shape, WORKSPACE_BYTES};
use crate::DType;
use crate::cuda::context::Context;
use crate::cuda::error::{CudaError, Result};
use crate::cuda::gpu::Gpu;
use crate::cuda::launch::Address;
use crate::cuda::library::{Found, Library, Search, find, functions};

/// Maximum stored shapes. Batches of different lengths keep bringing new ones; a dropped shape is prepared again.
const KEPT: usize = 4096;

/// `cublasStatus_t` as a number, because a newer library may return codes that the enumeration lacks.
type Status = u32;

functions! {
    /// Functions of cuBLASLt that this crate calls.
    Functions:
    cublasLtGetStatusName(Status) -> *const c_char;
    cublasLtCreate(*mut cublasLtHandle_t) -> Status;
    cublasLtDestroy(cublasLtHandle_t) -> Status;
    cublasLtMatmulDescCreate(
        *mut cublasLtMatmulDesc_t, cublasComputeType_t, cudaDataType_t
    ) -> Status;
    cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t) -> Status;
    cublasLtMatmulDescSetAttribute(
        cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, *const c_void, usize
    ) -> Status;
    cublasLtMatrixLayoutCreate(
        *mut cublasLtMatrixLayout_t, cudaDataType_t, u64, u64, i64
    ) -> Status;
    cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t) -> Status;
    cublasLtMatmulPreferenceCreate(*mut cublasLtMatmulPreference_t) -> Status;
    cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t) -> Status;
    cublasLtMatmulPreferenceSetAttribute(
        cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, *const c_void, usize
    ) -> Status;
    cublasLtMatmulAlgoGetHeuristic(
        cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
        cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, c_int,
        *mut cublasLtMatmulHeuristicResult_t, *mut c_int
    ) -> Status;
    cublasLtMatmul(
        cublasLtHandle_t, cublasLtMatmulDesc_t, *const c_void, *const c_void,
        cublasLtMatrixLayout_t, *const c_void, cublasLtMatrixLayout_t, *const c_void,
        *const c_void, cublasLtMatrixLayout_t, *mut c_void, cublasLtMatrixLayout_t,
        *const cublasLtMatmulAlgo_t, *mut c_void, usize, *mut c_void
    ) -> Status;
}

functions! {
    /// The function that needs no GPU.
    Age:
    cublasLtGetVersion() -> usize;
}

impl Functions {
    /// `call` describes the failed call.
    fn check(&self, call: &str, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: returns a constant string for every number.
        let name = unsafe { CStr::from_ptr((self.cublasLtGetStatusName)(status)) };
        Err(CudaError::Driver {
            call: format!("cuBLASLt {call}"),
            code: name.to_string_lossy().into_owned(),
        })
    }
}

/// cuBLASLt handle for one GPU, with the algorithms chosen so far for product shapes.
#[derive(Debug)]
pub struct CublasLt {
    functions: Arc<Functions>,
    handle: cublasLtHandle_t,
    context: Arc<Context>,
    /// Prepared products by shape; `None` for shapes that the library refuses.
    prepared: Mutex<HashMap<Shape, Option<Prepared>>>,
    /// Set when the GPU will never become idle: destroying the handle would wait for it.
    abandoned: AtomicBool,
}

// SAFETY: several threads may use a handle at the same time. Descriptors are used under the lock only.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

/// Descriptors of a shape and the algorithm chosen for it.
#[derive(Debug)]
struct Prepared {
    description: Description,
    a: Layout,
    b: Layout,
    y: Layout,
    algorithm: cublasLtMatmulAlgo_t,
}

/// Version of the library that was found, e.g. `13.1.0`.
pub(in crate::cuda) fn version(found: &Found) -> Option<String> {
    let functions = Age::load(found).ok()?;
    // SAFETY: the call needs no handle.
    let code = unsafe { (functions.cublasLtGetVersion)() };
    // Version 12.0 changed the encoding from XXYYZZ to XXXYYZZ; the same divisions read both.
    Some(format!(
        "{}.{}.{}",
        code / 10_000,
        code % 10_000 / 100,
        code % 100
    ))
}

impl CublasLt {
    /// Finds and opens the cuBLASLt library and creates a handle for `gpu`.
    ///
    /// # Errors
    /// [`CudaError::LibraryMissing`] with the places tried, [`CudaError::FunctionMissing`], and the library's error
    /// when it does not start.
    pub fn open(gpu: &Gpu, search: &Search) -> Result<Self> {
        let functions = Functions::load(&find(Library::CublasLt, search))?;
        gpu.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: one handle is written.
        functions.check("start", unsafe {
            (functions.cublasLtCreate)(&raw mut handle)
        })?;
        Ok(Self {
            functions: Arc::new(functions),
            handle,
            context: Arc::clone(gpu.stream().context()),
            prepared: Mutex::default(),
            abandoned: AtomicBool::new(false),
        })
    }

    /// Queues a matrix product on the GPU's compute stream. Returns `false`, with nothing queued, if the
    /// library has no algorithm for it. The answer for one shape is always the same.
    ///
    /// # Safety
    /// The addresses must be memory of this GPU of the sizes that the product states, and `workspace` memory of
    /// `workspace_bytes`. All of it must stay allocated until the stream has passed the product.
    ///
    /// # Errors
    /// When the workspace is smaller than [`WORKSPACE_BYTES`], an address of the product is not a multiple of
    /// [`ALIGNMENT`], or the library fails.
    pub unsafe fn multiply(
        &self,
        gpu: &Gpu,
        product: &Multiply,
        workspace: Address,
        workspace_bytes: u64,
    ) -> Result<bool> {
        let Multiply {
            a,
            b,
            y,
            bias,
            aux,
            alpha,
            beta,
            ..
        } = product;
        let aligned = [*a, *b, *y, *bias, *aux, workspace]
            .iter()
            .all(|address| address.0.is_multiple_of(ALIGNMENT));
        if workspace_bytes < WORKSPACE_BYTES || !aligned {
            return Err(CudaError::Driver {
                call: "cuBLASLt product".to_owned(),
                code: format!("{workspace_bytes} bytes of workspace, {product:?}"),
            });
        }
        gpu.bind()?;
        let mut prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        if !prepared.contains_key(&product.shape) {
            if prepared.len() >= KEPT {
                prepared.clear();
            }
            let new = self.prepare(product)?;
            prepared.insert(product.shape, new);
        }
        let Some(Some(prepared)) = prepared.get(&product.shape) else {
            return Ok(false);
        };
        prepared.description.point_to(product)?;
        let pointer = |address: Address| address.0 as *const c_void;
        // Row-major y = a b^T is column-major y^T = b a^T, so the library's A is b here.
        // SAFETY: the caller vouches for the addresses. Descriptors live and do not change under the lock. Scalars
        // and descriptors are read before the call returns.
        let queued = unsafe {
            (self.functions.cublasLtMatmul)(
                self.handle,
                prepared.description.raw,
                std::ptr::from_ref(alpha).cast(),
                pointer(*b),
                prepared.b.raw,
                pointer(*a),
                prepared.a.raw,
                std::ptr::from_ref(beta).cast(),
                pointer(*y),
                prepared.y.raw,
                y.0 as *mut c_void,
                prepared.y.raw,
                &raw const prepared.algorithm,
                workspace.0 as *mut c_void,
                WORKSPACE_BYTES as usize,
                gpu.stream().handle(),
            )
        };
        self.functions.check("product", queued)?;
        Ok(true)
    }

    /// Prepares a shape. `None` if the library has no algorithm for it.
    fn prepare(&self, product: &Multiply) -> Result<Option<Prepared>> {
        let shape = &product.shape;
        let (Some(kind), Some(out)) = (kind(shape.dtype), kind(shape.out)) else {
            return Ok(None);
        };
        let Shape { m, n, k, .. } = *shape;
        // A row-major matrix is a column-major matrix whose columns are its lines.
        let stored = |transposed: bool, rows: usize| match transposed {
            true => [rows, k],
            false => [k, rows],
        };
        let functions = &self.functions;
        let a = Layout::new(functions, kind, stored(shape.transpose_a, m), shape.a_line)?;
        let b = Layout::new(functions, kind, stored(shape.transpose_b, n), shape.b_line)?;
        let y = Layout::new(functions, out, [n, m], shape.y_line)?;
        let description = Description::new(functions, shape)?;
        description.point_to(product)?;
        let algorithm = self.choose(&description, [&b, &a, &y])?;
        Ok(algorithm.map(|algorithm| Prepared {
            description,
            a,
            b,
            y,
            algorithm,
        }))
    }

    fn choose(
        &self,
        description: &Description,
        [a, b, c]: [&Layout; 3],
    ) -> Result<Option<cublasLtMatmulAlgo_t>> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Preference::new(&self.functions)?;
        preference.set(
            Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            WORKSPACE_BYTES,
        )?;
        for attribute in [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            preference.set(attribute, ALIGNMENT as u32)?;
        }
        // Parts of a split sum are added in f32, in the workspace. Parts stored in y would be rounded to its dtype.
        let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        preference.set(
            Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
            scheme as u32,
        )?;
        let mut best = MaybeUninit::<cublasLtMatmulHeuristicResult_t>::zeroed();
        let mut found = 0;
        // SAFETY: all handles are alive; one result is requested and there is space for one.
        let status = unsafe {
            (self.functions.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                description.raw,
                a.raw,
                b.raw,
                c.raw,
                c.raw,
                preference.raw,
                1,
                best.as_mut_ptr(),
                &raw mut found,
            )
        };
        if status == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as Status {
            return Ok(None);
        }
        self.functions.check("choice of an algorithm", status)?;
        // SAFETY: bytes that were not written are zero, a valid value of this plain type.
        let best = unsafe { best.assume_init() };
        let usable = found > 0 && best.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS;
        Ok(usable.then_some(best.algo))
    }
}

impl CublasLt {
    /// Leaves the handle to the end of the process, because the GPU still waits for a dead rank.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        if *self.abandoned.get_mut() {
            return;
        }
        let bound = self.context.bind();
        let waited = bound.and_then(|()| self.context.driver().synchronize());
        let prepared = self.prepared.get_mut();
        prepared.unwrap_or_else(PoisonError::into_inner).clear();
        if waited.is_ok() {
            // SAFETY: created once, destroyed once, with nothing queued. A failing driver leaves nothing to do.
            let _unused_outcome = unsafe { (self.functions.cublasLtDestroy)(self.handle) };
        }
    }
}

fn kind(dtype: DType) -> Option<cudaDataType_t> {
    match dtype {
        DType::BF16 => Some(cudaDataType_t::CUDA_R_16BF),
        DType::F16 => Some(cudaDataType_t::CUDA_R_16F),
        DType::F32 => Some(cudaDataType_t::CUDA_R_32F),
        _ => None,
    }
}

/// Matmul descriptor: operand orientation and epilogue.
#[derive(Debug)]
struct Description {
    functions: Arc<Functions>,
    raw: cublasLtMatmulDesc_t,
}

impl Description {
    fn new(functions: &Arc<Functions>, shape: &Shape) -> Result<Self> {
        use sys::cublasLtEpilogue_t as Code;
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        // Sums are f32; f32 operands do not use TF32.
        let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let scale = cudaDataType_t::CUDA_R_32F;
        let mut raw = std::ptr::null_mut();
        // SAFETY: one handle is written.
        functions.check("description", unsafe {
            (functions.cublasLtMatmulDescCreate)(&raw mut raw, compute, scale)
        })?;
        let new = Self {
            functions: functions.clone(),
            raw,
        };
        // The library's A is b here, whose lines run along k unless it is transposed.
        let operation = |transposed: bool| i32::from(transposed);
        new.set(
            Attribute::CUBLASLT_MATMUL_DESC_TRANSA,
            operation(!shape.transpose_b),
        )?;
        new.set(
            Attribute::CUBLASLT_MATMUL_DESC_TRANSB,
            operation(shape.transpose_a),
        )?;
        let epilogue = match shape.epilogue {
            Epilogue::None => Code::CUBLASLT_EPILOGUE_DEFAULT,
            Epilogue::Bias => Code::CUBLASLT_EPILOGUE_BIAS,
            Epilogue::Gelu { aux: false } => Code::CUBLASLT_EPILOGUE_GELU,
            Epilogue::Gelu { aux: true } => Code::CUBLASLT_EPILOGUE_GELU_AUX,
            Epilogue::GeluBias { aux: false } => Code::CUBLASLT_EPILOGUE_GELU_BIAS,
            Epilogue::GeluBias { aux: true } => Code::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        };
        new.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue as u32)?;
        if shape.epilogue.has_aux() {
            let line = shape.n as i64;
            new.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, line)?;
        }
        Ok(new)
    }

    /// Sets the addresses that are part of the descriptor.
    fn point_to(&self, product: &Multiply) -> Result<()> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        if product.shape.epilogue.has_bias() {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias.0)?;
        }
        if product.shape.epilogue.has_aux() {
            let attribute = Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER;
            self.set(attribute, product.aux.0)?;
        }
        Ok(())
    }

    /// Sets an attribute whose type has the size of `T`.
    fn set<T: Copy>(&self, attribute: cublasLtMatmulDescAttributes_t, value: T) -> Result<()> {
        // SAFETY: the descriptor is alive, and the library checks the size against that of the attribute.
        let status = unsafe {
            (self.functions.cublasLtMatmulDescSetAttribute)(
                self.raw,
                attribute,
                (&raw const value).cast(),
                size_of::<T>(),
            )
        };
        self.functions.check("attribute of a description", status)
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _unused_outcome = unsafe { (self.functions.cublasLtMatmulDescDestroy)(self.raw) };
    }
}

/// Layout of a column-major matrix.
#[derive(Debug)]
struct Layout {
    functions: Arc<Functions>,
    raw: cublasLtMatrixLayout_t,
}

impl Layout {
    fn new(
        functions: &Arc<Functions>,
        kind: cudaDataType_t,
        [rows, columns]: [usize; 2],
        column_elems: usize,
    ) -> Result<Self> {
        let (rows, columns, line) = (rows as u64, columns as u64, column_elems as i64);
        let mut raw = std::ptr::null_mut();
        // SAFETY: one handle is written.
        functions.check("layout", unsafe {
            (functions.cublasLtMatrixLayoutCreate)(&raw mut raw, kind, rows, columns, line)
        })?;
        Ok(Self {
            functions: functions.clone(),
            raw,
        })
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _unused_outcome = unsafe { (self.functions.cublasLtMatrixLayoutDestroy)(self.raw) };
    }
}

/// Limits for the choice of an algorithm.
#[derive(Debug)]
struct Preference<'f> {
    functions: &'f Functions,
    raw: cublasLtMatmulPreference_t,
}

impl<'f> Preference<'f> {
    fn new(functions: &'f Functions) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: one handle is written.
        functions.check("preference", unsafe {
            (functions.cublasLtMatmulPreferenceCreate)(&raw mut raw)
        })?;
        Ok(Self { functions, raw })
    }

    /// Sets an attribute whose type has the size of `T`.
    fn set<T: Copy>(
        &self,
        attribute: cublasLtMatmulPreferenceAttributes_t,
        value: T,
    ) -> Result<()> {
        // SAFETY: the preference is alive, and the library checks the size against that of the attribute.
        let status = unsafe {
            (self.functions.cublasLtMatmulPreferenceSetAttribute)(
                self.raw,
                attribute,
                (&raw const value).cast(),
                size_of::<T>(),
            )
        };
        self.functions.check("attribute of a preference", status)
    }
}

impl Drop for Preference<'_> {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _unused_outcome = unsafe { (self.functions.cublasLtMatmulPreferenceDestroy)(self.raw) };
    }
}
