//! Makes an environment an image of containerd, without a byte of its layers.
//!
//! containerd gets the documents of the image and a name for it, and finds each layer unpacked already: this
//! program has the snapshotter show the layer, then asks containerd for the snapshot of that ChainID, which the
//! snapshotter answers with "is there". A lease of containerd keeps everything until the name points to it.
//!
//! CRASH: what is there without a name goes when the lease expires.

use crate::api::Descriptor;
use crate::api::content::v1 as content;
use crate::api::content::v1::content_client::ContentClient;
use crate::api::images::v1 as images;
use crate::api::images::v1::images_client::ImagesClient;
use crate::api::leases::v1 as leases;
use crate::api::leases::v1::leases_client::LeasesClient;
use crate::api::snapshots::v1 as snapshots;
use crate::api::snapshots::v1::snapshots_client::SnapshotsClient;
use crate::labels::{TARGET, WANTED_ENVIRONMENT, WANTED_LAYER, chain_id, sha256};
use layer::{Context, EnvId, Error, ErrorKind, LayerId, Result};
use prost_types::FieldMask;
use proto::status::from_status;
use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tonic::Request;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;

/// How often a snapshot is shown again that a collection of containerd took.
const TRIES: usize = 5;
/// Names the date when a lease ends by itself, for the case that this process dies.
const LEASE_LABEL: &str = "containerd.io/gc.expire";
/// How long a lease lasts.
const LEASE: Duration = Duration::from_secs(3600);

/// A layer of the image.
#[derive(Debug, Clone)]
pub struct ImageLayer {
    /// What the configuration calls it.
    pub diff_id: String,
    /// What shows it.
    pub layer: LayerId,
    /// The document that stands for it, where it never was a blob.
    pub pointer: Option<Vec<u8>>,
}

/// An image to make known.
#[derive(Debug, Clone)]
pub struct Image {
    /// How containerd is to call it.
    pub name: String,
    /// The manifest and its media type.
    pub manifest: (Vec<u8>, String),
    /// The configuration.
    pub config: Vec<u8>,
    /// The bottom one first.
    pub layers: Vec<ImageLayer>,
    /// Says what is read of them.
    pub environment: Option<EnvId>,
}

/// Where to make it known.
#[derive(Debug, Clone)]
pub struct Place {
    /// The socket of containerd.
    pub containerd: PathBuf,
    /// The socket of the snapshotter.
    pub socket: PathBuf,
    /// What containerd's configuration calls it.
    pub snapshotter: String,
    /// The namespace of containerd.
    pub namespace: String,
}

/// Makes an image known; answers the digest of its manifest.
///
/// `Unavailable` when containerd or the snapshotter does not answer.
pub async fn register(image: &Image, place: &Place) -> Result<String> {
    let own = proto::connect::unix(&place.socket).await?;
    let channel = proto::connect::unix(&place.containerd).await?;
    let header = |text: &str| {
        MetadataValue::try_from(text)
            .map_err(|error| Error::invalid(format!("{text:?} is no name")).with_source(error))
    };
    let mut session = Session {
        own: SnapshotsClient::new(own),
        channel: channel.clone(),
        namespace: header(&place.namespace)?,
        lease: None,
        snapshotter: place.snapshotter.clone(),
    };
    let labels = HashMap::from([(LEASE_LABEL.to_owned(), rfc3339(SystemTime::now() + LEASE))]);
    let request = session.request(leases::CreateRequest { id: String::new(), labels });
    let lease = LeasesClient::new(channel.clone()).create(request).await.map_err(from_status);
    let lease = lease.context(|| "lease from containerd".to_owned())?.into_inner().lease;
    let id = lease.map(|lease| lease.id).unwrap_or_default();
    session.lease = Some(header(&id)?);
    let done = session.image(image).await;
    let request = session.request(leases::DeleteRequest { id, sync: false });
    let ended = LeasesClient::new(channel).delete(request).await.map_err(from_status);
    let digest = done?;
    ended.context(|| "end the lease".to_owned())?;
    Ok(digest)
}

struct Session {
    own: SnapshotsClient<Channel>,
    channel: Channel,
    namespace: MetadataValue<Ascii>,
    lease: Option<MetadataValue<Ascii>>,
    snapshotter: String,
}

impl Session {
    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.metadata_mut().insert("containerd-namespace", self.namespace.clone());
        if let Some(lease) = &self.lease {
            request.metadata_mut().insert("containerd-lease", lease.clone());
        }
        request
    }

    async fn image(&mut self, image: &Image) -> Result<String> {
        let (mut chain, mut own_parent) = (String::new(), String::new());
        for layer in &image.layers {
            let above = chain_id(&chain, &layer.diff_id);
            own_parent = self
                .layer(&chain, &above, &own_parent, layer, image.environment)
                .await
                .context(|| format!("snapshot of layer {}", layer.layer.short()))?;
            chain = above;
        }
        let mut references = HashMap::new();
        for layer in &image.layers {
            if let Some(pointer) = &layer.pointer {
                let digest = self.blob(pointer, &HashMap::new()).await?;
                let name = format!("containerd.io/gc.ref.content.l.{}", references.len());
                references.insert(name, digest);
            }
        }
        let name = format!("containerd.io/gc.ref.snapshot.{}", self.snapshotter);
        let config = self.blob(&image.config, &HashMap::from([(name, chain)])).await?;
        references.insert("containerd.io/gc.ref.content.config".to_owned(), config);
        let (manifest, media_type) = &image.manifest;
        let digest = self.blob(manifest, &references).await?;
        let target = Descriptor {
            media_type: media_type.clone(),
            digest: digest.clone(),
            size: length(manifest)?,
            annotations: HashMap::new(),
        };
        self.point(&image.name, target).await?;
        Ok(digest)
    }

    /// The snapshot of one layer, shown and known to containerd; answers what the snapshotter calls it.
    async fn layer(
        &mut self,
        below: &str,
        chain: &str,
        own_parent: &str,
        layer: &ImageLayer,
        environment: Option<EnvId>,
    ) -> Result<String> {
        let key = format!("lamella-{} {chain}", std::process::id());
        let mut labels = HashMap::from([(TARGET.to_owned(), chain.to_owned())]);
        let plain = labels.clone();
        labels.insert(WANTED_LAYER.to_owned(), layer.layer.to_string());
        if let Some(environment) = environment {
            labels.insert(WANTED_ENVIRONMENT.to_owned(), environment.to_string());
        }
        for _ in 0..TRIES {
            let shown = self.own.prepare(snapshots::PrepareSnapshotRequest {
                snapshotter: self.snapshotter.clone(),
                key: key.clone(),
                parent: own_parent.to_owned(),
                labels: labels.clone(),
            });
            is_there(shown.await)?;
            let request = self.request(snapshots::PrepareSnapshotRequest {
                snapshotter: self.snapshotter.clone(),
                key: key.clone(),
                parent: below.to_owned(),
                labels: plain.clone(),
            });
            let mut client = SnapshotsClient::new(self.channel.clone());
            if is_there(client.prepare(request).await)? {
                return self.own_name(chain, own_parent).await;
            }
            // containerd collected it before it knew that somebody wants it, so this made a directory instead.
            let snapshotter = self.snapshotter.clone();
            let request = snapshots::RemoveSnapshotRequest { snapshotter, key: key.clone() };
            client.remove(self.request(request)).await.map_err(from_status)?;
        }
        Err(Error::new(ErrorKind::Busy, "containerd collects it again and again"))
    }

    /// What the snapshotter calls the snapshot of a ChainID on this parent.
    async fn own_name(&mut self, chain: &str, parent: &str) -> Result<String> {
        let filter = format!("labels.\"{TARGET}\"=={chain},parent==\"{parent}\",kind==committed");
        let request = snapshots::ListSnapshotsRequest {
            snapshotter: self.snapshotter.clone(),
            filters: vec![filter],
        };
        let mut listed = self.own.list(request).await.map_err(from_status)?.into_inner();
        let first = listed.message().await.map_err(from_status)?;
        let found = first.and_then(|part| part.info.into_iter().next());
        found.map(|info| info.name).ok_or_else(|| {
            let text = "the socket is not the one that containerd's configuration names";
            Error::not_found(format!("a snapshot that was just made; perhaps {text}"))
        })
    }

    /// Puts a blob, or adds labels to one that is there; answers its digest.
    async fn blob(&self, bytes: &[u8], labels: &HashMap<String, String>) -> Result<String> {
        let digest = sha256(bytes);
        let written = content::WriteContentRequest {
            action: content::WriteAction::Commit.into(),
            r#ref: format!("lamella-{}-{digest}", std::process::id()),
            total: length(bytes)?,
            expected: digest.clone(),
            offset: 0,
            data: bytes.to_vec(),
            labels: labels.clone(),
        };
        let mut client = ContentClient::new(self.channel.clone());
        let what = || format!("put {digest}");
        match self.write(&mut client, written).await {
            Err(error) if error.kind() == ErrorKind::Exists => {}
            other => return other.context(what).map(|()| digest.clone()),
        }
        let paths: Vec<String> = labels.keys().map(|name| format!("labels.{name}")).collect();
        if !paths.is_empty() {
            let info = content::Info { digest: digest.clone(), size: 0, labels: labels.clone() };
            let update_mask = Some(FieldMask { paths });
            let request = content::UpdateRequest { info: Some(info), update_mask };
            client.update(self.request(request)).await.map_err(from_status).context(what)?;
        }
        Ok(digest)
    }

    async fn write(
        &self,
        client: &mut ContentClient<Channel>,
        message: content::WriteContentRequest,
    ) -> Result<()> {
        let request = self.request(tokio_stream::once(message));
        let mut answers = client.write(request).await.map_err(from_status)?.into_inner();
        while answers.message().await.map_err(from_status)?.is_some() {}
        Ok(())
    }

    /// Has the name point to the image, whatever it pointed to.
    async fn point(&self, name: &str, target: Descriptor) -> Result<()> {
        let image =
            images::Image { name: name.to_owned(), labels: HashMap::new(), target: Some(target) };
        let mut client = ImagesClient::new(self.channel.clone());
        let request = self.request(images::CreateImageRequest { image: Some(image.clone()) });
        match client.create(request).await.map_err(from_status) {
            Err(error) if error.kind() == ErrorKind::Exists => {}
            other => return other.context(|| format!("name {name:?}")).map(drop),
        }
        let update_mask = Some(FieldMask { paths: vec!["target".to_owned()] });
        let request = self.request(images::UpdateImageRequest { image: Some(image), update_mask });
        client.update(request).await.map_err(from_status).context(|| format!("name {name:?}"))?;
        Ok(())
    }
}

/// Whether a snapshot was there; false when it was made.
fn is_there<T>(prepared: std::result::Result<T, tonic::Status>) -> Result<bool> {
    match prepared.map_err(from_status) {
        Ok(_) => Ok(false),
        Err(error) if error.kind() == ErrorKind::Exists => Ok(true),
        Err(error) => Err(error),
    }
}

fn length(bytes: &[u8]) -> Result<i64> {
    i64::try_from(bytes.len()).map_err(|_| Error::invalid("a document without end"))
}

/// A date as containerd reads it.
fn rfc3339(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Years that begin in March, so that the leap day is the last one; 719_468 days before 1970 is such a begin.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, over) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = era * 400 + year + over;
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, date) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (1_796_032_800, "2026-11-30T10:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(UNIX_EPOCH + Duration::from_secs(seconds)), date);
        }
    }
}
