//! How often each call of a service is made, how long it takes, and how often it fails.
//!
//! A call that streams its answer is over here when the answer begins.

use super::{Counter, Histogram, Kind, Page};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;
use tonic::codegen::http::{Request, Response};
use tonic::service::Routes;
use tower::{Layer, Service};

/// One call.
#[derive(Debug)]
struct Call {
    name: &'static str,
    took: Histogram,
    failed: Counter,
}

/// The calls of one service.
#[derive(Debug)]
pub struct Calls {
    service: &'static str,
    calls: Vec<Call>,
}

impl Calls {
    /// The calls of the image daemon.
    pub fn of_images() -> Arc<Self> {
        Self::of("Images", include_str!("../../v1/images.proto"))
    }

    /// The calls of the runtime.
    pub fn of_sandboxes() -> Arc<Self> {
        Self::of("Sandboxes", include_str!("../../v1/sandboxes.proto"))
    }

    /// The calls of the file-system daemon.
    pub fn of_layer_fs() -> Arc<Self> {
        Self::of("LayerFs", include_str!("../../v1/layerfs.proto"))
    }

    /// The calls of a service, as its interface names them.
    fn of(service: &'static str, interface: &'static str) -> Arc<Self> {
        let names = interface.lines().filter_map(|line| line.trim().strip_prefix("rpc "));
        let names = names.filter_map(|line| line.split(['(', ' ']).next());
        let call = |name| Call { name, took: Histogram::default(), failed: Counter::default() };
        Arc::new(Self { service, calls: names.map(call).collect() })
    }

    /// The same routes, measured.
    pub fn measure(self: &Arc<Self>, routes: Routes) -> Routes {
        Routes::from(routes.into_axum_router().layer(Meter(Arc::clone(self))))
    }

    /// The place of the call with this path, `/lamella.v1.SERVICE/CALL`.
    fn position(&self, path: &str) -> Option<usize> {
        let (service, name) = path.strip_prefix("/lamella.v1.")?.split_once('/')?;
        let position = self.calls.iter().position(|call| call.name == name)?;
        (service == self.service).then_some(position)
    }
}

/// Writes down the calls of some services that were made at least once.
pub fn write(page: &mut Page, services: &[&Calls]) {
    let name = "rpc_seconds";
    page.family(name, "How long calls take until their answer begins.", Kind::Histogram);
    let made = || {
        services.iter().flat_map(|service| {
            let calls = service.calls.iter().filter(|call| call.took.count() > 0);
            calls.map(|call| ([("service", service.service), ("method", call.name)], call))
        })
    };
    for (labels, call) in made() {
        page.buckets(name, &labels, &call.took);
    }
    let name = "rpc_errors_total";
    page.family(name, "Calls that were answered with an error.", Kind::Counter);
    for (labels, call) in made() {
        page.value(name, &labels, call.failed.get());
    }
}

#[derive(Debug, Clone)]
struct Meter(Arc<Calls>);

impl<S> Layer<S> for Meter {
    type Service = Measured<S>;

    fn layer(&self, inner: S) -> Measured<S> {
        Measured { inner, calls: Arc::clone(&self.0) }
    }
}

#[derive(Debug, Clone)]
struct Measured<S> {
    inner: S,
    calls: Arc<Calls>,
}

impl<S, B, R> Service<Request<B>> for Measured<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
{
    type Response = Response<R>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<R>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let position = self.calls.position(request.uri().path());
        let (calls, begin) = (Arc::clone(&self.calls), Instant::now());
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            if let Some(call) = position.and_then(|position| calls.calls.get(position)) {
                call.took.observe_since(begin);
                // An answer that is an error has nothing but its head.
                let status = answer.headers().get("grpc-status");
                if status.is_some_and(|status| status != "0") {
                    call.failed.add(1);
                }
            }
            Ok(answer)
        })
    }
}
