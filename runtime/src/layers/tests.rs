//! Attaches against a double of fsd that answers only once all of them have come.

use super::*;
use proto::v1::layer_fs_server::{LayerFs, LayerFsServer};
use proto::v1::*;
use std::time::Duration;
use tokio::sync::Barrier;
use tonic::{Request, Response, Status};

const LAYERS: [LayerId; 3] = [LayerId([1; 32]), LayerId([2; 32]), LayerId([3; 32])];
/// The layer that cannot be attached where one cannot.
const BROKEN: LayerId = LAYERS[1];

struct Together {
    all: Barrier,
    broken: bool,
}

macro_rules! double {
    ($($call:ident: $request:ident => $answer:ident,)+) => {
        #[tonic::async_trait]
        impl LayerFs for Together {
            async fn attach(
                &self,
                request: Request<AttachRequest>,
            ) -> Result<Response<AttachResponse>, Status> {
                let layer = LayerId::from_slice(&request.into_inner().layer_id).unwrap();
                self.all.wait().await;
                if self.broken && layer == BROKEN {
                    return Err(Status::unavailable("broken"));
                }
                let mount_path = format!("/layers/{layer}");
                Ok(Response::new(AttachResponse { mount_path, ..AttachResponse::default() }))
            }
            $(async fn $call(&self, _: Request<$request>) -> Result<Response<$answer>, Status> {
                Err(Status::unimplemented("test double"))
            })+
        }
    };
}

double! {
    detach: DetachRequest => DetachResponse,
    export: ExportRequest => ExportResponse,
    withdraw: WithdrawRequest => WithdrawResponse,
    pin: PinRequest => PinResponse,
    check: CheckRequest => CheckResponse,
    complete: CompleteRequest => CompleteResponse,
    record: RecordRequest => RecordResponse,
    stop_record: StopRecordRequest => StopRecordResponse,
    prefetch: PrefetchRequest => PrefetchResponse,
    evict: EvictRequest => EvictResponse,
    serve: ServeRequest => ServeResponse,
    end_serve: EndServeRequest => EndServeResponse,
    stats: StatsRequest => StatsResponse,
    drain: DrainRequest => DrainResponse,
}

async fn attach(broken: bool) -> (Layers, Result<Vec<PathBuf>>) {
    let double = Together { all: Barrier::new(LAYERS.len()), broken };
    let routes = tonic::service::Routes::new(LayerFsServer::new(double));
    let channel = proto::connect::in_process(routes).await.unwrap();
    let layers = Layers::new(channel, "runtime".to_owned());
    // One after another would wait for ever.
    let attached = layers.attach(&LAYERS, None, Plane::Auto);
    let attached = tokio::time::timeout(Duration::from_secs(60), attached).await.unwrap();
    (layers, attached)
}

#[tokio::test]
async fn layers_are_attached_side_by_side_and_come_in_their_order() {
    let (layers, attached) = attach(false).await;
    let expected = LAYERS.map(|layer| PathBuf::from(format!("/layers/{layer}")));
    assert_eq!(attached.unwrap(), expected);
    // Without a call, which would wait for ever too.
    assert_eq!(layers.attach(&LAYERS, None, Plane::Auto).await.unwrap(), expected);
}

#[tokio::test]
async fn a_layer_that_cannot_be_attached_releases_the_others() {
    let (layers, attached) = attach(true).await;
    assert!(attached.is_err());
    let entries = layers.entries.lock().unwrap();
    assert_eq!(entries.len(), LAYERS.len());
    assert!(entries.values().all(|entry| entry.users == 0));
}
