//! Messages in, messages out.

use super::Service;
use crate::api::snapshots::v1 as wire;
use crate::labels::Labels;
use crate::record::{Kind, Snapshot};
use layer::Error;
use prost_types::Timestamp;
use proto::status::to_status;
use std::collections::HashMap;
use tonic::{Request, Response, Status};
use wire::snapshots_server::Snapshots;

/// Snapshots in one message of a listing.
const LISTED_AT_ONCE: usize = 100;

type Answer<T> = Result<Response<T>, Status>;
type Listed = Result<wire::ListSnapshotsResponse, Status>;

fn answer<T>(done: layer::Result<T>) -> Answer<T> {
    done.map(Response::new).map_err(|error| {
        tracing::debug!(error = error.chain(), "refused");
        to_status(error)
    })
}

fn labels(labels: HashMap<String, String>) -> Labels {
    labels.into_iter().collect()
}

fn time(ns: u64) -> Option<Timestamp> {
    let nanos = i32::try_from(ns % 1_000_000_000).ok()?;
    Some(Timestamp { seconds: i64::try_from(ns / 1_000_000_000).ok()?, nanos })
}

fn info(snapshot: Snapshot) -> wire::Info {
    let kind = match snapshot.kind {
        Kind::View => wire::Kind::View,
        Kind::Active => wire::Kind::Active,
        Kind::Committed => wire::Kind::Committed,
    };
    wire::Info {
        name: snapshot.name,
        parent: snapshot.parent,
        kind: kind.into(),
        created_at: time(snapshot.created_ns),
        updated_at: time(snapshot.updated_ns),
        labels: snapshot.labels.into_iter().collect(),
    }
}

#[tonic::async_trait]
impl Snapshots for Service {
    async fn prepare(
        &self,
        request: Request<wire::PrepareSnapshotRequest>,
    ) -> Answer<wire::PrepareSnapshotResponse> {
        let it = request.into_inner();
        let mounts = Service::prepare(self, it.key, it.parent, labels(it.labels)).await;
        answer(mounts.map(|mounts| wire::PrepareSnapshotResponse { mounts }))
    }

    async fn view(
        &self,
        request: Request<wire::ViewSnapshotRequest>,
    ) -> Answer<wire::ViewSnapshotResponse> {
        let it = request.into_inner();
        let mounts = self.make(Kind::View, it.key, it.parent, labels(it.labels)).await;
        answer(mounts.map(|mounts| wire::ViewSnapshotResponse { mounts }))
    }

    async fn mounts(&self, request: Request<wire::MountsRequest>) -> Answer<wire::MountsResponse> {
        let mounts = Service::mounts(self, &request.get_ref().key).await;
        answer(mounts.map(|mounts| wire::MountsResponse { mounts }))
    }

    async fn commit(&self, request: Request<wire::CommitSnapshotRequest>) -> Answer<()> {
        let it = request.into_inner();
        answer(Service::commit(self, it.key, it.name, labels(it.labels)).await)
    }

    async fn remove(&self, request: Request<wire::RemoveSnapshotRequest>) -> Answer<()> {
        answer(Service::remove(self, request.into_inner().key).await)
    }

    async fn stat(
        &self,
        request: Request<wire::StatSnapshotRequest>,
    ) -> Answer<wire::StatSnapshotResponse> {
        let found = self.state().get(&request.get_ref().key).cloned();
        answer(found.map(|found| wire::StatSnapshotResponse { info: Some(info(found)) }))
    }

    async fn update(
        &self,
        request: Request<wire::UpdateSnapshotRequest>,
    ) -> Answer<wire::UpdateSnapshotResponse> {
        let it = request.into_inner();
        let Some(wanted) = it.info else {
            return answer(Err(Error::invalid("an update of nothing")));
        };
        let paths = it.update_mask.map(|mask| mask.paths).unwrap_or_default();
        let labels = labels(wanted.labels);
        let updated = self.locked(move |state| state.update(&wanted.name, &labels, &paths)).await;
        answer(updated.map(|updated| wire::UpdateSnapshotResponse { info: Some(info(updated)) }))
    }

    type ListStream = tokio_stream::Iter<std::vec::IntoIter<Listed>>;

    async fn list(&self, request: Request<wire::ListSnapshotsRequest>) -> Answer<Self::ListStream> {
        let listed = Service::list(self, &request.get_ref().filters);
        answer(listed.map(|listed| {
            let infos: Vec<wire::Info> = listed.into_iter().map(info).collect();
            let parts = infos.chunks(LISTED_AT_ONCE);
            let parts = parts.map(|part| Ok(wire::ListSnapshotsResponse { info: part.to_vec() }));
            tokio_stream::iter(parts.collect::<Vec<Listed>>())
        }))
    }

    async fn usage(&self, request: Request<wire::UsageRequest>) -> Answer<wire::UsageResponse> {
        let usage = Service::usage(self, &request.get_ref().key).await;
        let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        answer(usage.map(|usage| wire::UsageResponse {
            size: number(usage.bytes),
            inodes: number(usage.inodes),
        }))
    }

    async fn cleanup(&self, _request: Request<wire::CleanupRequest>) -> Answer<()> {
        answer(Service::cleanup(self).await)
    }
}
