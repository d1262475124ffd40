//! `env create`: stacks layers into an environment document and names it.

use super::images::{Entry, layer_ids, point, resolve};
use super::{Scene, named};
use crate::args::EnvCreate;
use crate::embed;
use crate::errors::{Failure, Outcome};
use layer::LayerId;
use layer::environment::{Environment, RunConfig};
use layer::reference::{RefKind, Reference};
use proto::v1::resolve_response::Target as Resolved;
use proto::v1::{ClosePublishRequest, CommitEnvironmentRequest, OpenPublishRequest, tag_request};

/// How long the publish may take; it is two small writes.
const PUBLISH_TTL_MS: u64 = 600_000;

/// An environment's name: `env/` may be left out.
pub fn environment_name(text: &str) -> Outcome<Reference> {
    let reference = super::reference(text)?;
    if reference.kind() == RefKind::Env {
        return Ok(reference);
    }
    Err(Failure::Usage(format!("{text:?} is no environment's name; write NAME:TAG")))
}

/// Sets a variable of `K=V` lines, replacing one of the same name.
fn set_variable(env: &mut Vec<String>, variable: &str) {
    let key = variable.split('=').next().unwrap_or_default();
    env.retain(|known| known.split('=').next() != Some(key));
    env.push(variable.to_owned());
}

/// Layers of all names, bottom first, and the settings of the environments among them: a later one
/// replaces what an earlier one says.
async fn stack(images: &mut embed::Images, names: &[String]) -> Outcome<(Vec<LayerId>, RunConfig)> {
    let (mut layers, mut config) = (Vec::new(), RunConfig::default());
    for name in names {
        let answer = resolve(images, &named(name)?).await?;
        if let Some(Resolved::EnvId(_)) = answer.target {
            let below = std::mem::take(&mut config.env);
            let own = Environment::decode(&answer.environment_document)?.config;
            config = RunConfig { env: below, ..own.clone() };
            for variable in &own.env {
                set_variable(&mut config.env, variable);
            }
        }
        layers.extend(layer_ids(&answer)?);
    }
    Ok((layers, config))
}

fn apply(config: &mut RunConfig, args: &EnvCreate) {
    for variable in &args.env {
        set_variable(&mut config.env, variable);
    }
    if let Some(cwd) = &args.cwd {
        config.cwd.clone_from(cwd);
    }
    if let Some(user) = &args.user {
        config.user.clone_from(user);
    }
    if !args.entrypoint.is_empty() {
        config.entrypoint.clone_from(&args.entrypoint);
    }
    if !args.cmd.is_empty() {
        config.cmd.clone_from(&args.cmd);
    }
    config.labels.extend(args.labels.iter().cloned());
}

/// `env create`
pub async fn create(scene: &Scene, args: EnvCreate) -> Outcome {
    let name = environment_name(&args.name)?;
    let mut images = embed::images(&scene.settings, scene.out).await?;
    let opened = images
        .client
        .open_publish(OpenPublishRequest {
            purpose: format!("env create {name}"),
            ttl_ms: PUBLISH_TTL_MS,
        })
        .await?
        .into_inner();
    let made = publish(&mut images, &args, &name, &opened.publish_id).await;
    let close = ClosePublishRequest { publish_id: opened.publish_id };
    let closed = images.client.close_publish(close).await;
    let entry = made?;
    closed?;
    scene.out.result(&entry, || name.to_string())
}

async fn publish(
    images: &mut embed::Images,
    args: &EnvCreate,
    name: &Reference,
    publish_id: &str,
) -> Outcome<Entry> {
    let (layers, mut config) = stack(images, &args.layers).await?;
    apply(&mut config, args);
    let environment = Environment::new(layers, config)?;
    let committed = images
        .client
        .commit_environment(CommitEnvironmentRequest {
            publish_id: publish_id.to_owned(),
            document: environment.canonical(),
        })
        .await?
        .into_inner();
    Ok(point(&mut images.client, name, tag_request::Target::EnvId(committed.env_id)).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_is_set_once() {
        let mut env = vec!["A=1".to_owned(), "AB=2".to_owned()];
        set_variable(&mut env, "A=3");
        assert_eq!(env, ["AB=2", "A=3"]);
    }

    #[test]
    fn only_an_environment_can_be_created() {
        assert_eq!(environment_name("x:1").unwrap().to_string(), "env/x:1");
        assert!(matches!(environment_name("base/x:1"), Err(Failure::Usage(_))));
    }
}
